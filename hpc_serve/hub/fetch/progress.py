"""How far a number of bytes is, how fast it goes of late, and how long it takes still. Pure.

It serves whoever reads or copies much: `fetch`, and the staging of a model on a node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hpc_serve.durations import about
from hpc_serve.sizes import readable_size

_RATE_OVER_S = 10.0
_LEAST_S = 1.0


@dataclass(frozen=True, kw_only=True)
class TransferProgress:
    """How far it is. `bytes_per_s` is None until it is known."""

    done: int
    total: int
    bytes_per_s: float | None = None

    @property
    def time_left_s(self) -> float | None:
        """Seconds until all is done, at the speed of late."""
        if not self.bytes_per_s or self.bytes_per_s < 1:
            return None
        return max(0, self.total - self.done) / self.bytes_per_s

    @property
    def words(self) -> str:
        """The same as one line.

        >>> TransferProgress(done=3 * 2**30, total=15 * 2**30, bytes_per_s=200 * 2**20).words
        '3.0 GiB of 15.0 GiB (20 %), 200 MiB/s, about 60 s left'
        """
        percent = 100 * self.done // self.total if self.total else 100
        words = f"{readable_size(self.done)} of {readable_size(self.total)} ({percent} %)"
        left_s = self.time_left_s
        if left_s is None or self.bytes_per_s is None or self.done >= self.total:
            return words
        return f"{words}, {readable_size(round(self.bytes_per_s))}/s, {about(left_s)} left"


class Meter:
    """The speed of a counter over the last seconds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, done: int) -> TransferProgress:
        """Return the progress at a time of a monotonic clock."""
        if self._looks and done < self._looks[-1][1]:  # something is fetched anew
            self._looks.clear()
        self._looks.append((now_s, done))
        while len(self._looks) > 2 and now_s - self._looks[0][0] > _RATE_OVER_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        rate = (done - before) / (now_s - since_s) if now_s - since_s >= _LEAST_S else None
        return TransferProgress(done=done, total=self.total, bytes_per_s=rate)


class Tenths:
    """Whether a progress is worth a line where lines stay: at each tenth, and once a minute."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._tenth = 0
        self._every_s = every_s
        self._told_s: float | None = None

    def is_one(self, now_s: float, progress: TransferProgress) -> bool:
        """Return whether to print a line now; True marks the progress as printed."""
        tenth = 10 * progress.done // progress.total if progress.total else 10
        if self._told_s is None:
            self._told_s = now_s
        if tenth <= self._tenth and now_s - self._told_s < self._every_s:
            return False
        self._tenth, self._told_s = max(tenth, self._tenth), now_s
        return True
