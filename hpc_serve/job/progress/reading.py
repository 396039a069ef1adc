"""The bytes that the processes of a run have read on one node, in the kernel's three ways of counting.

No count is complete: a mapped file is read without read(), and a file in the page cache without a disk. The kernel
counts disks alone, no network filesystem and no FUSE. `start_stages` and `start_progress` decide what follows.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from hpc_serve.job.machine.process import marked_pids

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ReadSoFar(NamedTuple):
    """Bytes that came by read(), bytes that came from disks, and bytes of mapped files that came into memory."""

    by_read: int = 0
    from_disk: int = 0
    mapped: int = 0

    def __add__(self, other: ReadSoFar) -> ReadSoFar:  # type: ignore[override]
        return ReadSoFar(*(mine + its for mine, its in zip(self, other)))

    @property
    def total(self) -> int:
        """Return the sum. It shows that something is read, not how much: some bytes count several times."""
        return sum(self)


class RunReading:
    """Looks at the processes of this node with a run's mark, again and again. For one thread at a time."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._mapped_now: dict[int, int] = {}
        self._mapped = 0

    def look(self) -> ReadSoFar:
        """Return the bytes read so far. The first two counts fall when a process has ended."""
        by_read = from_disk = 0
        mapped_now: dict[int, int] = {}
        for pid in marked_pids(self._mark):
            with contextlib.suppress(OSError, ValueError, IndexError):
                folder = Path("/proc") / str(pid)
                counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                by_read += int(counts["rchar"])
                from_disk += int(counts["read_bytes"])
                mapped_now[pid] = int((folder / "statm").read_text().split()[2]) * _PAGE_BYTES
        # It falls where a file is unmapped; what came before stays read.
        self._mapped += sum(max(0, size - self._mapped_now.get(pid, 0)) for pid, size in mapped_now.items())
        self._mapped_now = mapped_now
        return ReadSoFar(by_read=by_read, from_disk=from_disk, mapped=self._mapped)
