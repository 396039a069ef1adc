"""What a run's processes share in /dev/shm, so that it can be removed when nobody is left to do so.

vLLM, PyTorch and NCCL choose random names there and remove them at their own end; one that is killed leaves them, and
no name says whose it was. So they are noted while the run lives: what its own processes have mapped is its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# vLLM: psm_ (Python's own prefix), vllm_ (offloaded cache, processed images, ranks on a CPU), sem.mp- (spawned
# processes). Ray opens its object store there and unlinks it at once.
_NAME = re.compile(r"(?:psm_|vllm_|sem\.mp-|torch_|nccl-)[^/\\\s]+")
_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, order=True)
class Segment:
    """A file in /dev/shm. A name may be used again, together with its inode it is not."""

    name: str
    inode: int


def listed(*, folder: Path = _FOLDER) -> set[Segment]:
    """This user's segments of known kinds."""
    try:
        entries = [Segment(entry.name, entry.inode()) for entry in os.scandir(folder)]
    except OSError:
        return set()
    return {segment for segment in entries if _is_ours(segment, folder)}


def mapped_by(pids: Iterable[int], segments: Iterable[Segment], *, folder: Path = _FOLDER) -> set[Segment]:
    """Those of `segments` that any of these processes has mapped; a process that may not be looked at has none."""
    inodes = {inode for pid in pids for inode in _mapped_inodes(pid, folder)}
    return {segment for segment in segments if segment.inode in inodes}


def remove(segments: Iterable[Segment], *, folder: Path = _FOLDER) -> list[Segment]:
    """Remove those that are still there, are this user's, and are mapped by none of the user's processes."""
    there = [segment for segment in segments if _is_ours(segment, folder)]
    if not there:
        return []
    in_use = mapped_by(map(int, filter(str.isdigit, os.listdir("/proc"))), there, folder=folder)
    removed = [segment for segment in there if segment not in in_use]
    for segment in removed:
        with contextlib.suppress(OSError):
            (folder / segment.name).unlink()
    return removed


def _mapped_inodes(pid: int, folder: Path) -> Iterator[int]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        # Address, permissions, offset, device, inode, path. The path is that of the first mapping: a semaphore is
        # mapped under another name, which is removed when it gets its own.
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{folder}/"):
            yield int(fields[4])


def _is_ours(segment: Segment, folder: Path) -> bool:
    try:
        found = os.lstat(folder / segment.name)
    except OSError:
        return False
    is_same = stat.S_ISREG(found.st_mode) and found.st_ino == segment.inode and found.st_uid == os.geteuid()
    return is_same and _NAME.fullmatch(segment.name) is not None
