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
SILENT_TIMES = 1.5
# An engine hangs if its figures stay the same for so long, or so many times the longest pause. After streams that went
# well two looks at the figures are enough.
HUNG_S = 1.2
HUNG_TIMES = 3.5
STILL_S = 0.45
# Where no stream tells of the replica: it is asked when nothing has come for so long. The clients of an engine share
# the cost: together they ask for its figures five times a second at most.
QUIET_S = 0.4
SHARE_S = 0.2
# Its network is unsteady if a question had to be sent again and a stream has stood still for so long, or if two
# questions had to, so long one after the other. What is older does not count. While it may be, or while one stream of
# several stands still, it is asked at this pace.
UNSTEADY_S = 0.8
LOSSES_APART_S = 0.5
_LOSSES_COUNT_S = 3.0
_ASK_ONE_S = 0.4
# An engine that may stand still is asked again after a moment; one that is silent for long, and works, seldom.
_ASK_SOON_S = 0.2
_ASK_SOON_WITHIN_S = 2.0
_ASK_LATER_S = 2.5
_HALTS_FOR_S = 3.0
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
        self._reads_until_s = -math.inf
        self._stalled_at_s: float | None = None
        self._stalled_since_s = now_s  # what a stream did before says nothing
        self._losses_s: list[float] = []

    def skip(self, seconds: float) -> None:
        """This program stood still for so long: that time says nothing of the replica."""
        self._sign_at_s += seconds
        self._figures_at_s += seconds
        if self._word_at_s is not None:
            self._word_at_s += seconds
        if self._stalled_at_s is not None:
            self._stalled_at_s = self._stalled_since_s = self._stalled_at_s + seconds

    def hear(
        self,
        *,
        word_at_s: float | None,
        sign_at_s: float,
        now_s: float,
        reads_until_s: float = -math.inf,
        stalled_at_s: float | None = None,
    ) -> None:
        """What has been heard by now: `word_at_s` the last word of the streams that have begun, None if there are none;
        `stalled_at_s` the last one of the stream that has stood still for longest; `sign_at_s` the last bytes of any
        answer. Until `reads_until_s` its engine may be reading prompts of ours.
        """
        self._reads_until_s = reads_until_s
        self._stalled_at_s = max(stalled_at_s, self._stalled_since_s) if stalled_at_s is not None else None
        self._sign_at_s = max(self._sign_at_s, sign_at_s)
        if word_at_s is None:
            self._word_at_s = None
        elif self._word_at_s is None:
            self._word_at_s = max(word_at_s, self._started_at_s)
        elif word_at_s > self._word_at_s:
            if not any(at_s > self._word_at_s for at_s in self._losses_s):  # else the network paused, not the engine
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

    def stalled_s(self, now_s: float) -> float:
        """For how long the one of its streams has stood still that has done so for longest; 0 if there are none."""
        return now_s - self._stalled_at_s if self._stalled_at_s is not None else 0.0

    def is_silent(self, now_s: float) -> bool:
        """Whether its streams have stood still for longer than usual."""
        return self.silent_s(now_s) > self._silent_after_s(now_s)

    def is_halting(self, now_s: float) -> bool:
        """Whether its streams, or lately one of them, have stopped for longer than usual, or a question was lost."""
        if self.is_silent(now_s) or self.has_losses(now_s):
            return True
        # One that has stood still for longer may be one that its user does not read on.
        return self._silent_after_s(now_s) < self.stalled_s(now_s) < _HALTS_FOR_S

    def _silent_after_s(self, now_s: float) -> float:
        return max(SILENT_S, SILENT_TIMES * self.usual_s(now_s))

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
            left_s = self._long_s(now_s) - self._still_s
            return asked_s >= (min(_ASK_SOON_S, left_s) if left_s > 0 else _ASK_SOON_S)
        if self.is_silent(now_s):
            return asked_s >= (_ASK_SOON_S if self.silent_s(now_s) < _ASK_SOON_WITHIN_S else _ASK_LATER_S)
        stalled_s = self.stalled_s(now_s)
        if self.has_losses(now_s) or stalled_s > SILENT_S:  # usual or not: a network may have such pauses, too
            return asked_s >= max(self._share_s, _ASK_ONE_S if stalled_s < _ASK_SOON_WITHIN_S else _ASK_LATER_S)
        return min(asked_s, self.quiet_s(now_s)) >= max(self._quiet_pause_s(now_s), self._share_s)

    def _quiet_pause_s(self, now_s: float) -> float:
        return max(QUIET_S if self._word_at_s is None else SILENT_S, SILENT_TIMES * self.usual_s(now_s))

    def is_unusual(self, now_s: float) -> bool:
        """Whether it has been silent for longer than usual, so that a question without an answer says something."""
        return self.is_silent(now_s) or self.quiet_s(now_s) >= self._quiet_pause_s(now_s)

    def was_asked(self, now_s: float) -> None:
        """It is being asked."""
        self._asked_at_s = now_s

    def was_sent_again(self, now_s: float) -> None:
        """The network had lost a question to it."""
        self._losses_s = [*self._lately_lost(now_s), now_s]

    def _lately_lost(self, now_s: float) -> list[float]:
        return [at_s for at_s in self._losses_s if now_s - at_s < _LOSSES_COUNT_S]

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
        """For how long its engine has made no step although it has requests, if that is too long; otherwise 0.

        One step may be a long prompt.
        """
        if now_s < self._reads_until_s:
            return 0.0
        long_s = self._long_s(now_s)
        if self._still_s >= STILL_S and self.silent_s(now_s) > long_s:
            return self.silent_s(now_s)
        return self._still_s if self._still_s >= long_s else 0.0

    def _long_s(self, now_s: float) -> float:
        return max(HUNG_S, HUNG_TIMES * self.usual_s(now_s))

    def has_losses(self, now_s: float) -> bool:
        """Whether a question to it had to be sent again lately."""
        return bool(self._lately_lost(now_s))

    def unsteady_s(self, now_s: float) -> float:
        """For how long its network has lost what was sent, if that is too long; otherwise 0."""
        if not (losses_s := self._lately_lost(now_s)):
            return 0.0
        if (stalled_s := self.stalled_s(now_s)) >= UNSTEADY_S:
            return stalled_s
        return now_s - losses_s[0] if losses_s[-1] - losses_s[0] >= LOSSES_APART_S else 0.0

    def given_up(self, now_s: float) -> None:
        """Its requests go elsewhere. If that was wrong, it is given more time from now on."""
        if not self.unsteady_s(now_s):
            self._learn(max(self.silent_s(now_s), self.quiet_s(now_s), self._still_s), now_s)
        self.start(now_s)
