"""Decides whether an engine still works, by the facts that its API server's process has. Pure, standard library only.

An engine works while it makes steps, and while nothing is due. A step may take as long as its prompts justify, as long
as the engine's processes are neither stopped nor ended nor without use of CPU. `engine_facts` reads the facts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

LOOK_INTERVAL_S = 0.4
"""Between two looks; a question before that gets the last answer."""
# Seconds; after a longer time between two looks the process itself was suspended.
_LONGEST_INTERVAL_S = 12.0
# Seconds without a step after which the engine's processes are looked at.
_STILL_S = 0.4
_STOPPED_S = 1.0
_NO_CPU_S = 1.5
_LEAST_CPU_S = 0.03  # less than that within _NO_CPU_S is none
# Until prompts were seen: tokens a second that the slowest engines read.
_CAUTIOUS_TOKENS_PER_S = 256.0
_PROMPTS_REMEMBERED = 32
# An engine that made no step for long and went on may do so again, for a multiple of that time.
_TIMES_SEEN = 3.0
_MOST_LEARNED_S = 60.0
_SEEN_WITHIN_S = 600.0
_RANKS = "VLLM::"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a step may take in seconds: `least_s` always, `most_s` whatever its prompts are."""

    least_s: float = 5.0
    most_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the engine: its name, its state (a letter, as in /proc/PID/stat), and its use of CPU so far."""

    name: str
    state: str
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class EngineLook:
    """The findings of one look: `due` requests in the core, and the tokens of prompts that are not read yet.

    `counters` change with each step. A step reads `step_tokens` at most. `rates` are the reading speeds of prompts in
    tokens a second, by request. `ranks_burn_cpu_here`: all ranks are processes of this node, and a step uses CPU.
    """

    due: int = 0
    unread_tokens: int = 0
    counters: Hashable = None
    step_tokens: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    ranks_burn_cpu_here: bool = False


def step_s(seen: EngineLook, limits: Limits, *, tokens_per_s: float, learned_s: float, compiles: bool) -> float:
    """Return how many seconds a step may take.

    >>> seen = EngineLook(due=1, unread_tokens=50_000, step_tokens=8_192)
    >>> step_s(seen, Limits(), tokens_per_s=256, learned_s=0, compiles=False)
    32.0
    """
    if compiles:
        return limits.most_s
    tokens = min(seen.unread_tokens, seen.step_tokens or seen.unread_tokens)
    return min(max(limits.least_s, tokens / tokens_per_s, learned_s), limits.most_s)


class Judge:
    """Follows one engine from look to look. All times are seconds of one monotonic clock.

    `fault` says why the engine does not work, until it makes a step; "" while it works.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.fault = ""
        self._looked_at_s = float("-inf")
        self._counters: Hashable = None
        self._still_since_s: float | None = None
        self._rates: dict[str, float] = {}
        self._pauses: deque[tuple[float, float]] = deque()  # when it went on, and after how many seconds
        self._cpu_proves_something = True
        self._watch: _ProcessWatch | None = None

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for another look."""
        return now_s - self._looked_at_s >= LOOK_INTERVAL_S

    def look(self, seen: EngineLook, read_processes: Callable[[], Mapping[int, Process]], now_s: float) -> None:
        """Judge by one more look. The processes are read where the other facts leave a doubt."""
        stood_still = now_s - self._looked_at_s > _LONGEST_INTERVAL_S
        self._looked_at_s = now_s
        self._note_rates(seen.rates)
        if stood_still or seen.counters != self._counters:
            self._note_step(now_s, is_pause=not stood_still)
            self._counters = seen.counters
        if not seen.due or seen.counters is None:
            self._still_since_s = self._watch = None
        elif self._still_since_s is None:
            self._still_since_s = now_s
        elif not self.fault and now_s - self._still_since_s >= _STILL_S:
            if self._watch is None:
                self._watch = _ProcessWatch(read_processes(), now_s)
            else:
                self._watch.note(read_processes(), now_s)
            self.fault = self._find_fault(seen, self._watch, now_s, now_s - self._still_since_s)

    def _find_fault(self, seen: EngineLook, watch: _ProcessWatch, now_s: float, still_s: float) -> str:
        """Return why the engine does not work, which made its last step `still_s` seconds ago; "" if it works."""
        if watch.ended:
            return f"its engine's process {watch.ended} has ended"
        # A process that is seen stopped long after the last step has been so for a while. A debugger is quicker.
        if watch.stopped and (still_s >= _STOPPED_S or watch.stays_stopped):
            return f"its engine's process {watch.stopped} is stopped"
        if self._cpu_proves_something and seen.ranks_burn_cpu_here and watch.without_cpu_s(now_s) >= _NO_CPU_S:
            return f"its engine has made no step for {still_s:.0f} s, and its processes use no CPU"
        learned_s = _TIMES_SEEN * max((pause_s for _, pause_s in self._pauses), default=0.0)
        allowed_s = step_s(
            seen,
            self._limits,
            tokens_per_s=min(self._rates.values(), default=_CAUTIOUS_TOKENS_PER_S),
            learned_s=min(learned_s, _MOST_LEARNED_S),
            compiles=watch.compiles,
        )
        if still_s >= allowed_s:
            return f"its engine has made no step for {still_s:.0f} s; its prompts justify {allowed_s:.0f} s"
        return ""

    def _note_step(self, now_s: float, *, is_pause: bool) -> None:
        watch = self._watch
        was_stopped = watch is not None and watch.was_stopped
        if is_pause and self._still_since_s is not None and not was_stopped:
            self._pauses.append((now_s, now_s - self._still_since_s))
            if watch is not None and watch.without_cpu_s(now_s) >= _NO_CPU_S:
                self._cpu_proves_something = False  # its steps may sleep
        while self._pauses and now_s - self._pauses[0][0] > _SEEN_WITHIN_S:
            self._pauses.popleft()
        self.fault, self._still_since_s, self._watch = "", None, None

    def _note_rates(self, rates: Mapping[str, float]) -> None:
        self._rates.update(rates)
        while len(self._rates) > _PROMPTS_REMEMBERED:
            del self._rates[next(iter(self._rates))]


class _ProcessWatch:
    """The engine's processes since its last step."""

    def __init__(self, processes: Mapping[int, Process], now_s: float) -> None:
        self._first = self._now = processes
        self._used_cpu_at_s, self._cpu_s = now_s, 0.0
        self.compiles = False
        """Whether a process that is no rank has begun, or works: a compiler."""
        self.was_stopped = bool(self.stopped)
        self.stays_stopped = False
        """Whether a process was stopped at the last two looks."""

    def note(self, processes: Mapping[int, Process], now_s: float) -> None:
        before, stopped_before, self._now = self._now, self.stopped, processes
        used = {pid: one.cpu_s - before[pid].cpu_s for pid, one in processes.items() if pid in before}
        self._cpu_s += sum(used.values())
        wants = any(one.state in "RD" for one in processes.values())
        if wants or self._cpu_s >= _LEAST_CPU_S or not processes:
            self._used_cpu_at_s, self._cpu_s = now_s, 0.0
        helpers = {pid for pid, one in processes.items() if not one.name.startswith(_RANKS)}
        self.compiles |= any(pid not in self._first or used.get(pid, 0.0) >= _LEAST_CPU_S for pid in helpers)
        self.stays_stopped = bool(stopped_before and self.stopped)
        self.was_stopped |= bool(self.stopped)

    @property
    def ended(self) -> str:
        """Return the name of a rank that has ended."""
        for pid, one in self._first.items():
            if one.name.startswith(_RANKS) and (pid not in self._now or self._now[pid].state in "ZX"):
                return one.name
        return ""

    @property
    def stopped(self) -> str:
        """Return the name of a process that is stopped."""
        return next((one.name for one in self._now.values() if one.state in "Tt"), "")

    def without_cpu_s(self, now_s: float) -> float:
        return now_s - self._used_cpu_at_s
