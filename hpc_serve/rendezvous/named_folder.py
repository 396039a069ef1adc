"""Folders that a person names: made if they are missing, and used only if nobody else can change what is in them."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_serve.errors import StoreError
from hpc_serve.rendezvous.files import make_folders
from hpc_serve.rendezvous.names import check_log_path
from hpc_serve.rendezvous.ownership import require


def make_own_folder(path: Path, *, called: str, why: str) -> None:
    """Make a folder that a person has named, 0700, if it is missing. OSErrors are the caller's to explain.

    Raises InvalidRequestError, which says `why`, where others can change what is in it.
    """
    advice = f"{why}: set it to a folder of your own, below folders that only you and root can write to."
    require(path, "own", called=called, advice=advice)
    make_folders(path)
    require(path, "own", called=called, advice=advice)  # others may have made it, or one above it, a moment ago


def make_log_dir(path: Path, *, called: str) -> Path:
    """Make the folder of logs if it is missing, 0700, and return it. `called` is how a person named it.

    Raises InvalidRequestError where Slurm would not find it or others can change what is in it, StoreError where it
    cannot be made or written to.
    """
    check_log_path(str(path), called)
    try:
        make_own_folder(
            path,
            called=f"{called}={path}",
            why="Other users could put links in it, and logs would be written to wherever those lead",
        )
    except OSError as error:
        raise StoreError(f"the log folder {path} cannot be made: {error.strerror}. Set {called}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(f"the log folder {path} cannot be written to. Set {called} to one that can.")
    return path
