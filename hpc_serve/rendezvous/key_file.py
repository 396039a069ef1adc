"""A key in a private file: how one is made, and what counts as one. Other modules decide who must show it."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.files import create_private, read_private

_KEY = re.compile(r"[\x21-\x7e]{16,}")


def make_key(path: Path, *, is_shared: bool = False) -> None:
    """Write a new key unless a file is there; two makers at once end with one key. Raises StoreError.

    If it `is_shared` and its folder is shared with a group, the group may read it.
    """
    create_private(path, secrets.token_urlsafe(32) + "\n", is_shared=is_shared)


def read_key(path: Path, *, cure: str, owner: int | None = None) -> str:
    """Return the key. Never put it in a log, a command line or an error; `cure` is what to do about a file without one.

    `owner` is the number of another user who shares it. Raises FileNotFoundError, StoreError, RecordError
    (others can read it, or it is no key).
    """
    key = read_private(path, secret=True, owner=owner).strip()
    if not _KEY.fullmatch(key):
        raise RecordError(f"{path} holds no usable key (16 or more printable characters, no blanks): {cure}.")
    return key
