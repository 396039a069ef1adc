"""How fast each replica has answered this client lately, as a weight for the choice of the next one.

Pure: the caller tells the times. Requests are unlike, so only times of one kind are compared (`Kind`), on a scale of
factors, and only a replica that is more than twice as slow as the fastest counts as slower. What was seen is forgotten
with time, so that a replica that was slow once is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Kind = Literal["first", "stream", "whole"]
"""Until a stream's first bytes came, until its end; until the end of an answer that is none."""

# What counts as equal: answers are of all lengths, so that equal replicas look unlike for a while.
EQUAL_WITHIN = 2.0
HALF_LIFE_S = 30.0
_MOST_SAMPLES = 16.0
_ENOUGH_SAMPLES = 1.5  # with fewer, or older ones, a difference counts in part
_SHORTEST_S = 0.02  # shorter times tell of the client and its machine


class _Mean:
    """The mean of the logarithms of times; `count` is how many they are, older ones counting less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0.0
        self._at_s = 0.0

    def add(self, took_s: float, now_s: float) -> None:
        count = min(self.count(now_s), _MOST_SAMPLES - 1)
        self._count, self._at_s = count + 1, now_s
        self.value += (math.log(max(took_s, _SHORTEST_S)) - self.value) / self._count

    def count(self, now_s: float) -> float:
        return self._count * math.pow(0.5, (now_s - self._at_s) / HALF_LIFE_S)


class Speeds:
    """Not safe to share between threads: the pool's lock guards it."""

    def __init__(self) -> None:
        self._means: dict[Kind, dict[str, _Mean]] = {"first": {}, "stream": {}, "whole": {}}

    def note(self, name: str, kind: Kind, took_s: float, now_s: float) -> None:
        """A replica took so long for an answer of that kind."""
        self._means[kind].setdefault(name, _Mean()).add(took_s, now_s)

    def weights(self, names: Iterable[str], now_s: float) -> dict[str, float]:
        """How much each replica can take of what the fastest one can: 1.0 for those that are not known to be slower."""
        slower = dict.fromkeys(names, 0.0)
        for of_kind in self._means.values():
            known = {name: of_kind[name] for name in slower if name in of_kind}
            fastest = min((mean.value for mean in known.values()), default=0.0)
            for name, mean in known.items():
                certainty = min(1.0, mean.count(now_s) / _ENOUGH_SAMPLES)
                slower[name] = max(slower[name], (mean.value - fastest) * certainty)
        return {name: 1.0 if log <= math.log(EQUAL_WITHIN) else math.exp(-log) for name, log in slower.items()}

    def keep(self, names: Iterable[str]) -> None:
        """Forget all replicas but these."""
        kept = set(names)
        for of_kind in self._means.values():
            for name in of_kind.keys() - kept:
                del of_kind[name]
