"""The folders on a node that hold engines' compiled code, for the next start of the service. Each kind of engine has
one (`cache_key`), and each engine of that kind that runs at once has a further one.

A launcher holds a lock on the file beside the folder as long as it lives, so no two engines of a host fill one folder.
An engine runs the code that it finds there: a folder is used only if nobody but its user can have changed it. All
folders together are bounded in size; those used last stay. Which folder a run uses is decided in `engine_cache`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.job.machine import guarded_folders
from hpc_serve.job.machine.guarded_folders import lock_beside, others_file, remove_tree

_log = logging.getLogger(__name__)
READY = "ready"
"""The name of the file in a folder that says on which machine an engine became ready with what lies there."""
_NAME = re.compile(r"[0-9a-f]{16}-\d{1,3}")
_MOST_AT_ONCE = 64
_UNUSED_S = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class LockedFolder:
    """A folder that this process has locked; `descriptor` holds the lock."""

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

    A folder with a file of another user is removed first, and is skipped if it cannot be removed. Raises OSError, for
    example on a filesystem without locks.
    """
    for number in range(first, first + _MOST_AT_ONCE):
        path = root / f"{key}-{number}"
        descriptor = lock_beside(path)
        if descriptor is None:
            continue
        try:
            if (reason := others_file(path)) is not None:
                _log.warning("caches of an earlier start are removed: %s", reason)
                remove_tree(path, mark=READY)
            path.mkdir(mode=0o700, exist_ok=True)
            if others_file(path) is None:
                return LockedFolder(path=path, descriptor=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def empty_folder(path: Path) -> None:
    """Remove all that is in a locked folder. Raises OSError for what cannot be removed."""
    remove_tree(path, mark=READY)
    path.mkdir(mode=0o700)


def remove_unused(root: Path, *, limit_bytes: int) -> list[Path]:
    """Remove folders that are not in use: after a month without use, and the longest unused while all take more than
    `limit_bytes`. Returns the removed ones."""
    return guarded_folders.remove_unused(root, _NAME, mark=READY, limit_bytes=limit_bytes, keep_s=_UNUSED_S)
