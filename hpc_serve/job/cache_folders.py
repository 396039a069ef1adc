"""The folders on a node that hold what engines have compiled, for the next start of the same service: one for each kind
of engine (`cache_key`), and a further one for each that runs at the same time.

A launcher holds a lock on the file beside the folder as long as it lives, so no two engines of a host fill one folder.
An engine runs the code that it finds there: a folder is used only if nobody but its user can have changed it. All
folders together are bounded in size; those used last stay. Which folder a run uses is decided in `engine_cache`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.rendezvous.ownership import fault

_log = logging.getLogger(__name__)
READY = "ready"
"""The name of the file in a folder that says on which machine an engine became ready with what lies there."""
_NAME = re.compile(r"[0-9a-f]{16}-\d{1,3}")
_MOST_AT_ONCE = 64
_UNUSED_S = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class LockedFolder:
    """A folder of which this process has the lock, in `descriptor`."""

    path: Path
    descriptor: int

    def note_use(self) -> None:
        """Count as used now: of many folders, those used last are kept."""
        with contextlib.suppress(OSError):
            os.utime(self.descriptor)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self.descriptor)


def lock_folder(root: Path, key: str, *, first: int = 0) -> LockedFolder | None:
    """Make and lock the first folder of this key that nobody uses, from number `first` on; None if all are in use.

    A folder in which somebody else has a file is removed first, and passed over if it cannot be. Raises OSError, as
    where the filesystem has no locks.
    """
    for number in range(first, first + _MOST_AT_ONCE):
        path = root / f"{key}-{number}"
        descriptor = _lock(path)
        if descriptor is None:
            continue
        try:
            if (reason := _others_file(path)) is not None:
                _log.warning("caches of an earlier start are removed: %s", reason)
                _remove_tree(path)
            path.mkdir(mode=0o700, exist_ok=True)
            if _others_file(path) is None:
                return LockedFolder(path=path, descriptor=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def empty_folder(path: Path) -> None:
    """Remove all that is in a locked folder; raises OSError for what cannot be removed."""
    (path / READY).unlink(missing_ok=True)  # first of all: a removal may be interrupted
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def remove_unused(root: Path, *, limit_bytes: int) -> list[Path]:
    """Remove folders that nobody uses: those unused for a month, and the longest unused while all take more than
    `limit_bytes`. Returns the removed ones."""
    removed = []
    with contextlib.suppress(OSError):
        names = {entry.name.removesuffix(".lock") for entry in os.scandir(root)}
        folders = [(_used_at(root / name), root / name) for name in names if _NAME.fullmatch(name)]
        sizes = {path: folder_bytes(path) for _, path in folders}
        total = sum(sizes.values())
        for used_at, path in sorted(folders):
            if total <= limit_bytes and time.time() - used_at < _UNUSED_S:
                continue
            if _remove(path):
                removed.append(path)
                total -= sizes[path]
    return removed


def folder_bytes(path: Path) -> int:
    """What the files in it take, in bytes."""
    return sum(status.st_blocks * 512 for _, status in _walk(path))


def _lock(path: Path) -> int | None:
    """The lock of a folder; None while another process has it. Raises OSError."""
    name = path.with_name(f"{path.name}.lock")
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def _remove(path: Path) -> bool:
    """Remove a folder unless it is in use; returns whether nothing of it is left."""
    with contextlib.suppress(OSError):
        descriptor = _lock(path)
        if descriptor is None:
            return False
        try:
            _remove_tree(path)
            if not os.path.lexists(path):
                path.with_name(f"{path.name}.lock").unlink()
                return True
        finally:
            os.close(descriptor)
    return False


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / READY).unlink()  # first of all: a removal may be interrupted
    shutil.rmtree(path, ignore_errors=True)
    if path.is_symlink() or path.is_file():
        path.unlink()


def _used_at(path: Path) -> float:
    for name in (path.with_name(f"{path.name}.lock"), path):
        with contextlib.suppress(OSError):
            return os.lstat(name).st_mtime
    return 0.0


def _others_file(path: Path) -> str | None:
    """Why a folder of caches may not be used; None if it may, or if it is not there."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() or not path.is_dir():
        return f"{path} is no folder"
    if (reason := fault(path, "private")) is not None:
        return reason
    for name, status in _walk(path):
        if status.st_uid != os.geteuid():
            return f"{name} belongs to user {status.st_uid}, not to you"
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return f"{name} is no file"
    return None


def _walk(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder, without following links. What vanishes or cannot be read meanwhile is left out."""
    folders = [str(path)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.path, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
