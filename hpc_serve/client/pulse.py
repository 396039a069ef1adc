"""How one replica sounds to this client: its words, its answers to questions, and whether it has gone silent. Pure.

A stream whose words came every 50 ms and that has stood still for half a second is a reason to ask, and no more. What
it means that a question stays unanswered is decided in `silence`. Pauses that passed by themselves are remembered for
some minutes: a replica that has them must be silent for longer.
"""

from __future__ import annotations

import math

from hpc_serve.vllm.metrics import EngineFigures

# Streams have gone silent after so long, or after so many times the longest pause that was usual.
SILENT_S = 0.5
SILENT_TIMES = 2.0
# An engine hangs if its figures stay the same for so long, or so many times the longest pause. After streams that went
# well two looks at the figures are enough.
HUNG_S = 1.2
HUNG_TIMES = 3.0
STILL_S = 0.45
# Where no stream tells of the replica: it is asked when nothing has come for so long. The clients of an engine share
# the cost: together they ask for its figures five times a second at most.
QUIET_S = 0.75
SHARE_S = 0.2
# An engine that may stand still is asked again after a moment; one that is silent for long, and works, seldom.
_ASK_SOON_S = 0.4
_ASK_SOON_WITHIN_S = 2.0
_ASK_LATER_S = 2.5
_HALF_LIFE_S = 120.0


class Pulse:
    """One replica, from `start` on. All times are seconds of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._usual_s = 0.0
        self._usual_at_s = now_s
        self.start(now_s)

    def start(self, now_s: float) -> None:
        """Times before this one say nothing: there were no requests, or this program stood still."""
        self._started_at_s = self._sign_at_s = now_s
        self._word_at_s: float | None = None
        self._asked_at_s = -math.inf
        self._figures: EngineFigures | None = None
        self._figures_at_s = now_s  # when they were seen first
        self._still_s = 0.0  # for how long they were seen to stay the same
        self._share_s = 0.0

    def hear(self, *, word_at_s: float | None, sign_at_s: float, now_s: float) -> None:
        """What has been heard by now: `word_at_s` the last word of the streams that have begun, None if there are none;
        `sign_at_s` the last bytes of any answer.
        """
        self._sign_at_s = max(self._sign_at_s, sign_at_s)
        if word_at_s is None:
            self._word_at_s = None
        elif self._word_at_s is None:
            self._word_at_s = max(word_at_s, self._started_at_s)
        elif word_at_s > self._word_at_s:
            self._learn(word_at_s - self._word_at_s, now_s)
            self._word_at_s = word_at_s
            self._see(None, now_s)

    def _learn(self, pause_s: float, now_s: float) -> None:
        if pause_s >= self.usual_s(now_s):
            self._usual_s, self._usual_at_s = pause_s, now_s

    def usual_s(self, now_s: float) -> float:
        """The longest pause that passed by itself; older ones count less."""
        return self._usual_s * math.pow(0.5, (now_s - self._usual_at_s) / _HALF_LIFE_S)

    def silent_s(self, now_s: float) -> float:
        """For how long its streams have stood still; 0 if there are none."""
        return now_s - self._word_at_s if self._word_at_s is not None else 0.0

    def is_silent(self, now_s: float) -> bool:
        """Whether its streams have stood still for longer than usual."""
        return self.silent_s(now_s) > max(SILENT_S, SILENT_TIMES * self.usual_s(now_s))

    def quiet_s(self, now_s: float) -> float:
        """For how long there has been no sign of life of any kind."""
        return now_s - self._sign_at_s

    def was_heard_since(self, then_s: float) -> bool:
        """Whether there has been a sign of life since then."""
        return self._sign_at_s > then_s

    def wants_question(self, now_s: float) -> bool:
        """Whether to ask it now whether it is there, and what its engine does."""
        asked_s = now_s - self._asked_at_s
        if self._still_s:
            return asked_s >= _ASK_SOON_S
        if self.is_silent(now_s):
            return asked_s >= (_ASK_SOON_S if self.silent_s(now_s) < _ASK_SOON_WITHIN_S else _ASK_LATER_S)
        pause_s = max(QUIET_S, SILENT_TIMES * self.usual_s(now_s), self._share_s)
        return min(asked_s, self.quiet_s(now_s)) >= pause_s

    def was_asked(self, now_s: float) -> None:
        """It is being asked."""
        self._asked_at_s = now_s

    def answered(self, figures: EngineFigures | None, now_s: float, *, requests: int) -> None:
        """It has answered; `figures` are what it said of its engine, which has so many requests of ours."""
        self._sign_at_s = now_s
        self._share_s = SHARE_S * figures.under_way / max(requests, 1) if figures is not None else 0.0
        self._see(figures if figures is not None and figures.under_way else None, now_s)

    def _see(self, figures: EngineFigures | None, now_s: float) -> None:
        if figures is not None and self._figures is not None and figures.steps == self._figures.steps:
            self._still_s = now_s - self._figures_at_s
            return
        if self._still_s:
            self._learn(now_s - self._figures_at_s, now_s)
        self._figures, self._figures_at_s, self._still_s = figures, now_s, 0.0

    def hung_s(self, now_s: float) -> float:
        """For how long its engine has made no step although it has requests, if that is too long; otherwise 0."""
        long_s = max(HUNG_S, HUNG_TIMES * self.usual_s(now_s))
        if self._still_s >= STILL_S and self.silent_s(now_s) > long_s:
            return self.silent_s(now_s)
        return self._still_s if self._still_s >= long_s else 0.0

    def given_up(self, now_s: float) -> None:
        """Its requests go elsewhere. If that was wrong, it is given more time from now on."""
        self._learn(max(self.silent_s(now_s), self.quiet_s(now_s), self._still_s), now_s)
        self.start(now_s)
