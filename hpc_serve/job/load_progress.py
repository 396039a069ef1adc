"""How far the weights of a start are, by the files that the engine counts and by what its processes read. Pure.

What follows for the time left is decided in `start_stages`.
"""

from __future__ import annotations

from collections import Counter, deque

from hpc_serve.job.reading import ReadSoFar
from hpc_serve.job.start_estimate import rest_of_load
from hpc_serve.sizes import MIB

_RATE_OVER_S = 15.0
# How fast it went of late: over so many seconds, or so much of the load so far.
_LATELY_S = 15.0
_LATELY_PART = 1 / 4
_LEAST_PART = 0.02
_LEAST_SHOWN_BYTES = 64 * MIB
_MOST_SAMPLES = 1_000


class LoadProgress:
    """How much of the weights is loaded, from 0 to 1, and how long the rest takes by how fast it went of late.

    The engine counts files: those that are done count by their `sizes`, in bytes, in the order in which it loads them;
    without sizes all count alike. Within a file, or where nobody counts any, what is read tells: `whole` bytes are
    all, until a file is done and shows how much is read for it.
    """

    def __init__(self, began_s: float) -> None:
        self.sizes: tuple[int, ...] = ()
        self.done = self.total = 0
        self.done_after_s = 0.0
        self._samples = [(began_s, 0.0)]
        self._bars = 0
        self._read = self._read_at_bar = self._read_at_done = 0
        self._is_read_within = False

    @property
    def counts_files(self) -> bool:
        """Whether the engine has begun to count files."""
        return self._bars > 0

    @property
    def part_done(self) -> float:
        """The files that are done, of all."""
        return self._part(self.done)

    def begin(self, now: float) -> None:
        """Nothing was loaded until now; once the engine counts files, its first one says so."""
        if not self._bars:
            self._samples = [(now, 0.0)]

    def note_files(self, done: int, total: int, now: float) -> None:
        """Note how many files the engine has loaded."""
        if not self._bars:
            self._read = 0
        if done < self.done or total != self.total:  # another bar has begun
            self._bars += 1
            self._read_at_bar = self._read_at_done = self._read
            self._samples, self.done, self.done_after_s, self.total = [(now, 0.0)], 0, 0.0, total
            self._is_read_within = False
        if done > self.done:
            self.done, self.done_after_s, self._read_at_done = done, now - self._samples[0][0], self._read
            self._add(now, self.part_done)

    def note_read(self, read_bytes: int, now: float, whole: int) -> None:
        """Note what is read of the weights; 0 for a `whole` that is not known."""
        self._read = max(self._read, read_bytes)
        position = self._position(whole)
        if position > self._samples[-1][1]:
            self._is_read_within = True
            self._add(now, position)

    def rest_s(self, now: float, past_s: float | None, *, other: float = 0.0) -> float | None:
        """Seconds until all is loaded, where all took `past_s` last time; None where too little is known of it.

        `other` is how much of what was read, as a part of the weights, was none of them.
        """
        samples = self._samples
        reached_s, position = samples[-1]
        if self._is_read_within and position - other < _LEAST_PART:
            return None
        following = position if self._is_read_within else self._part(min(self.done + 1, self.total))
        if not self._is_read_within and self.total < 2:
            return None
        over_s = max(_LATELY_S, _LATELY_PART * (reached_s - samples[0][0]))
        lately = next((n for n in reversed(range(len(samples))) if reached_s - samples[n][0] >= over_s), 0)
        since_s, before = samples[lately]
        return rest_of_load(
            position=position - other,
            following=following - other,
            lately=position - before,
            lately_s=reached_s - since_s,
            waited_s=now - reached_s,
            step_s=(reached_s - since_s) / max(1, len(samples) - 1 - lately),
            past_s=past_s,
        )

    def _position(self, whole: int) -> float:
        if self.total > 1 and self.done:
            within, of_all = self._read - self._read_at_done, self._read_at_done - self._read_at_bar
            if of_all < _LEAST_SHOWN_BYTES:
                return self.part_done
            position = self.part_done * (1 + within / of_all)
        elif whole and self._bars <= 1:
            position = (self._read - self._read_at_bar) / whole
            if not self._bars:
                return position
        else:
            return self.part_done
        return min(position, self._part(self.done + 1) if self.total > 1 else 1.0)

    def _part(self, files: int) -> float:
        if len(self.sizes) == self.total and (size := sum(self.sizes)):
            return sum(self.sizes[:files]) / size
        return files / self.total if self.total else 0.0

    def _add(self, now: float, position: float) -> None:
        if position > self._samples[-1][1]:
            kept = self._samples if len(self._samples) < _MOST_SAMPLES else self._samples[::2]
            self._samples = [*kept, (now, position)]  # a new list: another thread may look at the old one


class Reading:
    """What the processes of a run have read in each stage, and how fast of late."""

    def __init__(self) -> None:
        self.disk_bytes: Counter[str] = Counter()
        self._of_weights = [0, 0, 0]
        self._is_begun = True
        self._latest: ReadSoFar | None = None
        self._totals = [0, 0, 0]
        self._lately: deque[tuple[float, tuple[int, ...]]] = deque()

    @property
    def weights_bytes(self) -> int:
        """What was read of the weights. The same bytes may come in several ways, so the way that tells most counts."""
        return max(self._of_weights)

    @property
    def weights_and_rate(self) -> tuple[int, float]:
        """What was read of the weights, and how much a second of late.

        Ranks that map the same file have each their own part of it, and some of the others': where bytes come by read()
        or from a disk, those count.
        """
        if len(self._lately) < 2:
            return 0, 0.0
        (since_s, before), (until_s, after) = self._lately[0], self._lately[-1]
        over_s = max(until_s - since_s, 1e-3)
        by_read, from_disk, mapped = ((now - then) / over_s for then, now in zip(before, after))
        if max(by_read, from_disk) >= MIB:
            return max(self._of_weights[:2]), max(by_read, from_disk)
        return self._of_weights[2], mapped

    def begin_files(self) -> None:
        """The first file of the weights is begun: what was read until the next look, the engine has imported."""
        self._is_begun = False

    def note(self, read: ReadSoFar, now: float, stage: str) -> None:
        # It falls where a process has ended; what was read before the first look was not of the weights.
        before = read if self._latest is None else self._latest
        news = [max(0, after - earlier) for earlier, after in zip(before.counts, read.counts)]
        self._latest = read
        self._totals = [total + new for total, new in zip(self._totals, news)]
        self.disk_bytes[stage] += news[1]
        if not self._is_begun:
            self._of_weights, self._is_begun = [0, 0, 0], True
        elif stage == "weights":
            self._of_weights = [total + new for total, new in zip(self._of_weights, news)]
        else:
            self._lately.clear()
        self._lately.append((now, tuple(self._totals)))
        while now - self._lately[0][0] > _RATE_OVER_S:
            self._lately.popleft()
