"""The shared memory of a run: which files in /dev/shm its processes use, and how they are removed after it.

vLLM, PyTorch and NCCL make files of random names there and remove them at their end. A process that is killed leaves
its files, and their names do not show whose they were. The files that the run's processes have mapped are therefore
listed while the run lives. `sweep` decides when to list and when to remove them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# vLLM makes psm_ (Python's own prefix), vllm_ (offloaded cache, processed images, ranks on a CPU) and sem.mp- (spawned
# processes). Ray's object store needs no entry: Ray unlinks its file when it has opened it.
_NAME = re.compile(r"(?:psm_|vllm_|sem\.mp-|torch_|nccl-)[^/\\\s]+")
_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, order=True)
class Segment:
    """A file in /dev/shm. The inode distinguishes it from a later file of the same name."""

    name: str
    inode: int


def list_segments(*, folder: Path = _FOLDER) -> set[Segment]:
    """Return this user's segments with a name that matches `_NAME`."""
    try:
        entries = [Segment(entry.name, entry.inode()) for entry in os.scandir(folder)]
    except OSError:
        return set()
    return {segment for segment in entries if _is_ours(segment, folder)}


def mapped_by(pids: Iterable[int], segments: Iterable[Segment], *, folder: Path = _FOLDER) -> set[Segment]:
    """Return the `segments` that any of the processes has mapped. Processes with unreadable maps are left out."""
    inodes = {inode for pid in pids for inode in _mapped_inodes(pid, folder)}
    return {segment for segment in segments if segment.inode in inodes}


def remove(segments: Iterable[Segment], *, folder: Path = _FOLDER) -> list[Segment]:
    """Remove the segments that still exist, are this user's, and are mapped by none of the user's processes.

    Returns the removed ones.
    """
    existing = [segment for segment in segments if _is_ours(segment, folder)]
    if not existing:
        return []
    in_use = mapped_by(map(int, filter(str.isdigit, os.listdir("/proc"))), existing, folder=folder)
    removed = [segment for segment in existing if segment not in in_use]
    for segment in removed:
        with contextlib.suppress(OSError):
            (folder / segment.name).unlink()
    return removed


def _mapped_inodes(pid: int, folder: Path) -> Iterator[int]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        device = _device_of(folder)
    except OSError:
        return
    for line in lines:
        # The fields are address, permissions, offset, device, inode and path. The path is the name that the file had
        # when it was mapped. A semaphore is mapped before it gets its final name, so the inode is compared. Another
        # container has another /dev/shm, and there the same inode is another file.
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[3] == device and fields[5].startswith(f"{folder}/"):
            yield int(fields[4])


def _device_of(folder: Path) -> str:
    """As the kernel writes it in a process's maps."""
    device = os.stat(folder).st_dev
    return f"{os.major(device):02x}:{os.minor(device):02x}"


def _is_ours(segment: Segment, folder: Path) -> bool:
    try:
        found = os.lstat(folder / segment.name)
    except OSError:
        return False
    is_same = stat.S_ISREG(found.st_mode) and found.st_ino == segment.inode and found.st_uid == os.geteuid()
    return is_same and _NAME.fullmatch(segment.name) is not None
