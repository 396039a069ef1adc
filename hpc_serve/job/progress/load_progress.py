"""The loaded part of the weights, and the time for the rest at the rate of the last seconds. Pure.

The engine counts files, and the kernel tells what its processes have read. `start_stages` decides what follows for the
time left of the whole start.
"""

from __future__ import annotations

from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.sizes import MIB

_RATE_OVER_S = 15.0
_LEAST_PART = 0.02
_LEAST_BYTES = 64 * MIB
_MOST_SAMPLES = 1_000


class LoadProgress:
    """The loaded part of the weights, from 0 to 1.

    Finished files count by their `sizes` in bytes, in the engine's order of loading. If `sizes` is empty, all files
    count alike. The bytes read tell the progress of the current file, and the whole progress if the engine counts no
    files.
    """

    def __init__(self, began_s: float) -> None:
        self.sizes: tuple[int, ...] = ()
        self.done = self.total = 0
        self._samples = [(began_s, 0.0)]
        self._read = self._read_at_bar = self._read_at_done = 0

    @property
    def part(self) -> float:
        """Return the part that is loaded."""
        return self._samples[-1][1]

    def begin(self, now: float) -> None:
        """Nothing was loaded until now."""
        if not self.total:
            self._samples = [(now, 0.0)]

    def note_files(self, done: int, total: int, now: float) -> None:
        """Note how many files the engine has loaded."""
        if done < self.done or total != self.total:  # another bar has begun
            self._read = self._read if self.total else 0
            self._samples, self.done, self.total = [(now, 0.0)], 0, total
            self._read_at_bar = self._read_at_done = self._read
        if done > self.done:
            self.done, self._read_at_done = done, self._read
            self._add(now, self._files(done))

    def note_read(self, read_bytes: int, now: float, whole: int) -> None:
        """Note what is read of the weights, of `whole` bytes by all ranks; 0: not known."""
        self._read = max(self._read, read_bytes)
        of_done = self._read_at_done - self._read_at_bar
        if self.done and of_done >= _LEAST_BYTES:
            part = self._files(self.done) * (1 + (self._read - self._read_at_done) / of_done)
        elif whole and not self.done:
            part = (self._read - self._read_at_bar) / whole
        else:
            return
        self._add(now, min(part, self._files(self.done + 1) if self.total else 1.0))

    def rate(self, now: float) -> float | None:
        """Return the part that is loaded in a second, of late; None where too little is known.

        A next sample that is later than those before it lowers the rate.
        """
        reached_s, part = self._samples[-1]
        times = (n for n in reversed(range(len(self._samples))) if reached_s - self._samples[n][0] >= _RATE_OVER_S)
        first = next(times, 0)
        since_s, before = self._samples[first]
        gained, took_s, steps = part - before, reached_s - since_s, len(self._samples) - 1 - first
        if part < _LEAST_PART or not steps:
            return None
        is_between_files = self.done < self.total and part == self._files(self.done)
        step = self._files(self.done + 1) - part if is_between_files else gained / steps
        is_late = now - reached_s > took_s * step / gained
        return gained / max(now - since_s if is_late else took_s, 1e-3)

    def rest_s(self, now: float) -> float | None:
        """Return the seconds until all is loaded; None where too little is known."""
        rate = self.rate(now)
        if rate is None:
            return None
        reached_s, part = self._samples[-1]
        return max((1 - part) / rate - (now - reached_s), 0.0)

    def _files(self, files: int) -> float:
        if len(self.sizes) == self.total and (size := sum(self.sizes)):
            return sum(self.sizes[:files]) / size
        return min(files / self.total, 1.0) if self.total else 0.0

    def _add(self, now: float, part: float) -> None:
        if part > self.part:
            kept = self._samples if len(self._samples) < _MOST_SAMPLES else self._samples[::2]
            self._samples = [*kept, (now, part)]  # a new list: another thread may look at the old one


class WeightsRead:
    """The bytes of the weights that the processes of a run have read, in the kernel's three ways of counting."""

    def __init__(self) -> None:
        self._of_weights = (0, 0, 0)
        self._latest: ReadSoFar | None = None

    @property
    def total(self) -> int:
        """Bytes; the same bytes may come in several ways, so the way that tells most counts."""
        return max(self._of_weights)

    def begin(self) -> None:
        """Note that the first file is begun: the bytes read until now were the engine's imports."""
        self._of_weights = (0, 0, 0)

    def note(self, read: ReadSoFar, *, is_of_weights: bool) -> None:
        """Note a look. A count falls where a process has ended."""
        before, self._latest = self._latest or read, read
        if is_of_weights:
            news = (max(0, after - earlier) for earlier, after in zip(before, read))
            by_read, from_disk, mapped = (total + new for total, new in zip(self._of_weights, news))
            self._of_weights = (by_read, from_disk, mapped)
