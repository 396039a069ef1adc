"""How far the weights of a start are, by the files that the engine counts and by what its processes read. Pure.

What follows for the time left is decided in `start_stages`.
"""

from __future__ import annotations

from collections import Counter, deque

from hpc_serve.job.reading import ReadSoFar
from hpc_serve.job.start_estimate import rest_of_steps
from hpc_serve.sizes import MIB

_RATE_OVER_S = 15.0


class Steps:
    """The files of weights that are loaded, as the engine counts them from `began_s` on."""

    def __init__(self, began_s: float) -> None:
        self.done = self.total = 0
        self.done_after_s = 0.0
        self._began_s = began_s

    def note(self, done: int, total: int, now: float) -> None:
        if done < self.done or total != self.total:  # another bar has begun
            self._began_s, self.done, self.done_after_s = now, 0, 0.0
        if done > self.done:
            self.done, self.done_after_s = done, now - self._began_s
        self.total = total

    def rest_s(self, now: float, past_s: float | None) -> float | None:
        return rest_of_steps(
            done=self.done,
            total=self.total,
            done_after_s=self.done_after_s,
            elapsed_s=now - self._began_s,
            step_s=None if past_s is None else past_s / self.total,
        )


class Reading:
    """What the processes of a run have read in each stage, and how fast of late."""

    def __init__(self) -> None:
        self.disk_bytes: Counter[str] = Counter()
        self._of_weights = [0, 0, 0]
        self._latest: ReadSoFar | None = None
        self._totals = [0, 0, 0]
        self._lately: deque[tuple[float, tuple[int, ...]]] = deque()

    @property
    def weights_bytes(self) -> int:
        """What was read of the weights. The same bytes may come in several ways, so the way that tells most counts."""
        return max(self._of_weights)

    @property
    def bytes_per_s(self) -> float:
        """How fast of late, in the way that tells most of the weights."""
        if len(self._lately) < 2:
            return 0.0
        (since_s, before), (until_s, after) = self._lately[0], self._lately[-1]
        way = self._of_weights.index(self.weights_bytes)
        return (after[way] - before[way]) / max(until_s - since_s, 1e-3)

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

    def note(self, read: ReadSoFar, now: float, stage: str) -> None:
        # It falls where a process has ended; what was read before the first look was not of the weights.
        before = read if self._latest is None else self._latest
        news = [max(0, after - earlier) for earlier, after in zip(before.counts, read.counts)]
        self._latest = read
        self._totals = [total + new for total, new in zip(self._totals, news)]
        self.disk_bytes[stage] += news[1]
        if stage == "weights":
            self._of_weights = [total + new for total, new in zip(self._of_weights, news)]
        else:
            self._lately.clear()
        self._lately.append((now, tuple(self._totals)))
        while now - self._lately[0][0] > _RATE_OVER_S:
            self._lately.popleft()
