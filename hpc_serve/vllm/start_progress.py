"""Decides whether the start of an engine still makes progress: by the lines of its log, and by how much is read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from hpc_serve.sizes import MIB

# Lines that repeat while nothing moves: vLLM's complaints, and the answers to our own probes.
_WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for creating a placement group|\"(?:GET|POST) /\S* HTTP/"
)
# Ray's processes read some hundred bytes a second when nothing happens; the slowest useful load is far from this.
_LOADS_BYTES_PER_S = MIB
# No look takes so long. If more time has passed the launcher stood still, and its engine perhaps as well: a suspended
# job.
_LONGEST_LOOK_S = 60.0


class StartProgress:
    """The time of a start's last progress, by the monotonic clock. Gaps between looks do not count as idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress_at, self._read_bytes = clock(), 0
        self._looked_at = self._progress_at

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._progress_at

    def note_line(self, line: str) -> None:
        """Count a line of the engine's log as progress, unless it only says that the engine waits."""
        if not _WAITING.search(line):
            self._progress_at = self._clock()

    def note_read_bytes(self, read_bytes: int) -> None:
        """Count what all processes have read so far as progress, if it is as much as a load reads: one look."""
        now = self._clock()
        if now - self._looked_at > _LONGEST_LOOK_S:
            self._progress_at = now
        self._looked_at = now
        self._read_bytes = min(self._read_bytes, read_bytes)  # what a process has read goes with it
        if read_bytes - self._read_bytes >= _LOADS_BYTES_PER_S * self.idle_s:
            self._progress_at, self._read_bytes = self._clock(), read_bytes
