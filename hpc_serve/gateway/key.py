"""The key that clients of a gateway show, in a private file. It is in no command line and no log."""

from __future__ import annotations

from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.files import make_private_folder
from hpc_serve.rendezvous.key_file import make_key, read_key


def default_key_file(home: Path) -> Path:
    return home / "gateway" / "api_key"


def ensure_key(path: Path) -> str:
    """Return the key in a file, and make a missing key.

    Raises RecordError (not ours alone, or no key), StoreError.
    """
    if not path.parent.is_dir():
        make_private_folder(path.parent, tighten=False)
    make_key(path)
    try:
        return read_key(path, cure="remove it to have a new one")
    except FileNotFoundError:
        raise InvalidRequestError(f"{path} was removed while it was read; start the gateway again.") from None
