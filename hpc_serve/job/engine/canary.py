"""Decides whether an engine that was ready still answers, by what is seen of it from outside.

vLLM's /health may answer 200 while the engine behind it hangs. So an engine that makes no step is asked for a canary: a
completion of one token. A step is a change of the figures that the engine itself counts (`EngineFigures.steps`); they
change while it reads a long prompt, too. Pure: `engine_watch` asks, and tells what it saw, and when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hpc_serve.vllm.metrics import EngineFigures

LOOK_INTERVAL_S = 1.5
# No look takes so long. If more time has passed the launcher stood still, and its engine perhaps as well: a suspended
# job.
_LONGEST_LOOK_S = 12.0
# After so long without a step the engine is asked for a token; after a refusal, not again for a while.
_STILL_S = 2.0
_AFTER_REFUSAL_S = 6.0
_MOST_SILENCE_S = 10.0
_AFTER_SILENCE_S = 0.5
_UNHEALTHY_LOOKS = 2
# An engine that stood still and went on may stand still for a multiple of that time.
_TIMES_SEEN = 3.0
_MOST_LEARNED_S = 30.0
_SEEN_WITHIN_S = 600.0
# Without figures, or without a canary, a long queue and a hang look alike.
_UNCERTAIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look at an engine saw: the status of /health, and the figures of /metrics; None without an answer."""

    health: int | None
    figures: EngineFigures | None = None


class EngineJudge:
    """What is known of one engine. All times are seconds of one monotonic clock.

    An engine is unresponsive when /health is left unanswered for `limit_s` (10 s at most), when it answers with an
    error twice in a row, or when the engine makes no step and leaves a canary unanswered for `limit_s`. If the engine
    has other requests, that time counts from its last step. It is longer for an engine that lately stood still for long
    and then went on. An engine that was unresponsive is so until it has made a step.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._looked_at_s = self._answered_at_s = self._stepped_at_s = now_s
        self._health, self._unhealthy_looks = 200, 0
        self._figures: EngineFigures | None = None
        self._asked_at_s: float | None = None  # since when no canary has had an answer
        self._is_asked = False  # whether a canary is on its way
        self._has_own_step = False  # whether the figures are about to tell of a canary
        self._refused_at_s = float("-inf")
        self._seen: deque[tuple[float, float]] = deque()  # when it went on, and after how many seconds
        self._found_at_s = now_s
        self.complaint = ""
        """Why the engine is unresponsive; "" if it is not."""

    @property
    def complaint_s(self) -> float:
        """For how long it has been unresponsive."""
        return self._looked_at_s - self._found_at_s if self.complaint else 0.0

    @property
    def wants_canary(self) -> bool:
        """Whether to ask for a token now: nothing else shows that the engine works."""
        return (
            not self._is_asked
            and self._looked_at_s == self._answered_at_s
            and self._looked_at_s - self._stepped_at_s >= _STILL_S
            and self._looked_at_s - self._refused_at_s >= _AFTER_REFUSAL_S
        )

    @property
    def next_look_s(self) -> float:
        """After how many seconds to look again."""
        if self._answered_at_s < self._looked_at_s:
            return _AFTER_SILENCE_S
        if self._asked_at_s is None or self.complaint:
            return LOOK_INTERVAL_S
        left_s = self._still_limit_s - (self._looked_at_s - self._still_since_s)
        return min(LOOK_INTERVAL_S, max(left_s, 0.1))

    def note(self, look: Look, now_s: float) -> None:
        """Take in a look that has ended now."""
        if now_s - self._looked_at_s > _LONGEST_LOOK_S:
            self._forget_times(now_s)
            return
        self._looked_at_s = now_s
        if look.health is not None:
            self._answered_at_s, self._health = now_s, look.health
            self._unhealthy_looks = 0 if look.health == 200 else self._unhealthy_looks + 1
        if look.figures is not None:
            if self._figures is not None and look.figures.steps != self._figures.steps and not self._has_own_step:
                self._note_step(now_s)
            self._figures, self._has_own_step = look.figures, False
        self._judge()

    def note_canary_sent(self, now_s: float) -> None:
        """A canary is on its way."""
        self._is_asked = True
        if self._asked_at_s is None:
            self._asked_at_s = now_s

    def note_canary_answered(self, now_s: float) -> None:
        """The engine has made a token."""
        self._note_step(now_s)
        self._is_asked, self._asked_at_s, self._has_own_step = False, None, True
        self._judge()

    def note_canary_refused(self, now_s: float) -> None:
        """The API has answered without a token, as it does when the queue is full: nothing is known of the engine."""
        self._is_asked, self._asked_at_s, self._refused_at_s = False, None, now_s
        self._judge()

    def note_canary_lost(self) -> None:
        """The canary's connection broke, or it took too long. The next one takes its place."""
        self._is_asked = False

    def _note_step(self, now_s: float) -> None:
        still_s = now_s - self._still_since_s
        if self._asked_at_s is not None and still_s > _STILL_S:
            self._seen.append((now_s, still_s))
        while self._seen and now_s - self._seen[0][0] > _SEEN_WITHIN_S:
            self._seen.popleft()
        self._stepped_at_s = now_s
        self._asked_at_s = now_s if self._is_asked else None

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has requests beside the canary."""
        return self._figures is not None and self._figures.under_way > self._is_asked

    @property
    def _still_since_s(self) -> float:
        """Since when the engine has had something to do and has made no step."""
        if self._asked_at_s is None or self._is_busy:
            return self._stepped_at_s
        return max(self._asked_at_s, self._stepped_at_s)

    @property
    def _still_limit_s(self) -> float:
        if self._figures is None:
            return max(self._limit_s, _UNCERTAIN_S)
        learned_s = _TIMES_SEEN * max((seconds for _, seconds in self._seen), default=0.0)
        return max(self._limit_s, min(learned_s, _MOST_LEARNED_S))

    def _judge(self) -> None:
        if found := self._find_fault():
            self._found_at_s = self._found_at_s if self.complaint else self._looked_at_s
            self.complaint = found
        elif max(self._stepped_at_s, self._refused_at_s) > self._found_at_s:
            self.complaint = ""

    def _find_fault(self) -> str:
        silent_s = self._looked_at_s - self._answered_at_s
        still_s = self._looked_at_s - self._still_since_s
        if silent_s >= min(self._limit_s, _MOST_SILENCE_S):
            return f"its engine has left /health unanswered for {silent_s:.0f} s"
        if self._unhealthy_looks >= _UNHEALTHY_LOOKS:
            return f"its engine's /health answers {self._health}"
        if self._asked_at_s is not None and still_s >= self._still_limit_s:
            return f"its engine has made no token for {still_s:.0f} s, and left a request of one token unanswered"
        if self._is_busy and still_s >= max(self._limit_s, _UNCERTAIN_S):
            return f"its engine has made no token for {still_s:.0f} s, although it has requests"
        return ""

    def _forget_times(self, now_s: float) -> None:
        self._looked_at_s = self._answered_at_s = self._stepped_at_s = self._found_at_s = now_s
        self._unhealthy_looks = 0
        self._asked_at_s = now_s if self._is_asked else None
