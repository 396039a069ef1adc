"""How long a replica may be silent within an answer. lost_replicas.py decides whether it is lost then.

An engine of ours sends a sign every half second while it lives (`rendezvous/gate_headers.py`), so silence is evidence.
"""

from __future__ import annotations

import math

SILENT_S = 1.5
_PAUSE_TIMES = 1.5  # the limit, as a multiple of the longest pause that ended by itself
MOST_SILENT_S = 10.0
_REMEMBER_S = 120.0


class SilenceLimit:
    """The pauses of one replica, over all its connections. All times are seconds of one monotonic clock.

    Pauses that ended by themselves are remembered for a while: such a replica may be silent for longer. At `heard_at_s`
    the last bytes of an answer came, at `proved_at_s` the last good answer to a probe.
    """

    def __init__(self) -> None:
        self.heard_at_s = -math.inf
        self.proved_at_s = -math.inf
        self._longest_s = 0.0
        self._longest_at_s = -math.inf

    def note(self, now_s: float, pause_s: float) -> None:
        """Note that bytes of an answer came, after a pause."""
        self.heard_at_s = now_s
        if pause_s >= self._longest_s or now_s - self._longest_at_s > _REMEMBER_S:
            self._longest_s, self._longest_at_s = pause_s, now_s

    def limit_s(self, now_s: float) -> float:
        """Return how many seconds of silence are too long.

        >>> limit = SilenceLimit()
        >>> limit.note(100.0, pause_s=2.0)
        >>> limit.limit_s(101.0), limit.limit_s(300.0)
        (3.0, 1.5)
        """
        longest_s = self._longest_s if now_s - self._longest_at_s <= _REMEMBER_S else 0.0
        return min(max(SILENT_S, _PAUSE_TIMES * longest_s), MOST_SILENT_S)
