"""A certificate that is signed by its own key: who trusts it trusts one endpoint, and nobody else.

A gateway shows it to people of other accounts. The authority of the home would vouch for more than that. Key and
certificate lie in one private file and stay the same as long as they can, so that copies of the certificate stay good.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

from hpc_serve.rendezvous.files import read_private, write_private
from hpc_serve.trust.pem import certificates_of

_RENEWED_BEFORE_END = timedelta(days=90)


def ensure_self_signed(path: Path, *, names: Collection[str], addresses: Collection[str]) -> str:
    """Return the certificate (PEM) of the key in `path`, for these host names and IP addresses.

    The file holds both, 0600. It is made anew if it is missing, unusable or not secret, lacks a name, or ends within 90
    days. Raises StoreError, or InvalidRequestError without `cryptography`.
    """
    from hpc_serve.trust import making

    wanted = making.names(names, addresses)
    try:
        held = read_private(path, secret=True)
        (found,) = certificates_of(held)
        held_names, ends_at = making.names_and_end(found)
        if ends_at - making.now() > _RENEWED_BEFORE_END and set(wanted) <= set(held_names):
            return found
    except (FileNotFoundError, ValueError):
        pass
    # Two certificates of one name confuse a search by name.
    text = making.self_signed(f"hpc-serve gateway {secrets.token_hex(4)}", wanted)
    write_private(path, text)
    (made,) = certificates_of(text)
    return made
