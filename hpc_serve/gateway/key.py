"""The key that clients of a gateway show, in a private file. It is in no command line and no log."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private

_KEY = re.compile(r"[\x21-\x7e]{16,}")


def default_key_file(home: Path) -> Path:
    return home / "gateway" / "api_key"


def ensure_key(path: Path) -> str:
    """The key in a file, which is made if it is missing. Raises RecordError (not ours alone, or no key), StoreError."""
    if not path.parent.is_dir():
        make_private_folder(path.parent, tighten=False)
    create_private(path, secrets.token_urlsafe(32) + "\n")
    try:
        key = read_private(path, secret=True).strip()
    except FileNotFoundError:
        raise InvalidRequestError(f"{path} was removed while it was read; start the gateway again.") from None
    if not _KEY.fullmatch(key):
        raise RecordError(
            f"{path} holds no usable key (16 or more printable characters, no blanks): remove it to have a new one."
        )
    return key
