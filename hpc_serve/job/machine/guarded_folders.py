"""Folders of this user on a node that several runs may use: their names, the lock beside each, and whether another user
can have changed their content. A process that removes a folder has its lock alone, and removes the lock's file last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.rendezvous.files import create_private, make_folders, make_private_folder, read_private, write_private
from hpc_serve.rendezvous.ownership import fault, require

READY = "ready"
"""The name of the file in a folder that says that the rest of it may be used."""


def make_named_folder(base: Path, kind: str, home: Path, *, called: str) -> Path:
    """Make or find the folder of this user in `base`, by a name that all nodes read in the home; return its path.

    Strangers cannot know the name before it is used. If one has taken it nevertheless, this writes another name for the
    next call and raises PortsInUseError. Raises InvalidRequestError if others can replace what is in `base`, OSError
    where the folder cannot be made, StoreError where the home cannot be used.
    """
    require(
        base,
        "scratch",
        called=f"{called}={base}",
        advice="Name a folder of yours or of root's, with the sticky bit if others write to it, as /tmp has it.",
    )
    name_file = make_private_folder(home, tighten=False) / "node-folder"
    create_private(name_file, secrets.token_hex(8))
    path = base / f"hpc-serve-{kind}-{read_private(name_file).strip()}"
    with contextlib.suppress(FileExistsError):
        make_folders(path)
    if (reason := others_file(path, deep=False)) is not None:
        write_private(name_file, secrets.token_hex(8))
        raise PortsInUseError(f"{reason}; another name is needed.")
    return path


def lock_beside(path: Path, *, shared: bool = False) -> int | None:
    """The lock of a folder, alone or with others; None while another process has it otherwise. Raises OSError."""
    name = path.with_name(f"{path.name}.lock")
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.lstat(name)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass  # whoever had the lock has removed the folder and its file: make it anew
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def remove_unused(root: Path, names: re.Pattern[str], *, limit_bytes: int = 0, keep_s: float = 0.0) -> list[Path]:
    """Remove folders of `root` with such `names` that nobody uses; return the removed ones.

    Folders that were used in the last `keep_s` seconds stay, as long as all together take at most `limit_bytes`. The
    folders used last stay longest.
    """
    removed = []
    with contextlib.suppress(OSError):
        found = {entry.name.removesuffix(".lock") for entry in os.scandir(root)}
        used_at = {root / name: _used_at(root / name) for name in found if names.fullmatch(name)}
        sizes = {path: folder_bytes(path) for path in used_at}
        total = sum(sizes.values())
        for path in sorted(used_at, key=used_at.__getitem__):
            if total <= limit_bytes and time.time() - used_at[path] < keep_s:
                continue
            if remove_unless_locked(path):
                removed.append(path)
                total -= sizes[path]
    return removed


def folder_bytes(path: Path) -> int:
    """Return the bytes that the files in a folder take."""
    return sum(status.st_blocks * 512 for _, status in walk(path))


def _used_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return os.lstat(path.with_name(f"{path.name}.lock")).st_mtime
    return 0.0


def remove_unless_locked(path: Path) -> bool:
    """Remove a folder unless it is in use; returns whether nothing of it is left. Its lock's file goes with it."""
    with contextlib.suppress(OSError):
        lock = lock_beside(path)
        if lock is None:
            return False
        try:
            remove_tree(path)
            if not os.path.lexists(path):
                path.with_name(f"{path.name}.lock").unlink()
                return True
        finally:
            os.close(lock)
    return False


def remove_tree(path: Path) -> None:
    """Remove what lies at `path`."""
    with contextlib.suppress(OSError):
        (path / READY).unlink()  # first of all: a removal may be interrupted
    shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink() or path.is_file():
        path.unlink()


def others_file(path: Path, *, deep: bool = True) -> str | None:
    """Return why a folder may not be used; None if it may, or does not exist. `deep` looks at its files too."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_dir():
        return f"{path} is no folder"
    if (reason := fault(path, "private")) is not None:
        return reason
    for name, status in walk(path) if deep else ():
        if status.st_uid != os.geteuid():
            return f"{name} belongs to user {status.st_uid}, not to you"
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return f"{name} is no file"
    return None


def walk(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all that is below a folder, without following links. Entries that vanish or cannot be read are left out."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                yield f"{folder}/{name}", os.lstat(f"{folder}/{name}")
