"""Decides whether an engine still works, by facts that its API server's process has.

An engine works while it makes steps, and while nothing is due. A step may take as long as its prompts justify, as long
as the engine's processes are neither stopped nor ended nor without use of CPU.

The facts are read from vLLM's own objects in this process, and from /proc. Nothing of vLLM is imported. If a version of
vLLM lacks a name that is read here, nothing counts as due. So no engine is called hung for it, and the log says so
once. Standard library only.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# -- the judgement, pure

_LOOK_INTERVAL_S = 0.4
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


class EngineJudge:
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
        return now_s - self._looked_at_s >= _LOOK_INTERVAL_S

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


# -- the facts

_log = logging.getLogger(__name__)
LEAST_STEP_VARIABLE, MOST_STEP_VARIABLE = "HPC_SERVE_CANARY_S", "HPC_SERVE_STEP_S"
# vLLM's counters of steps. The use of the cache grows with each part of a long prompt, the others when it is read.
_COUNTERS = (
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"),
    "vllm:kv_cache_usage_perc",
)
_LEAST_PROMPT_TOKENS = 512  # the time of a shorter prompt says little about how fast prompts are read
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_API_SERVER = "VLLM::APIServ"


class EngineState:
    """The engine of this process: what it does now, and whether it works. `app` is the application of vLLM.

    While it `is_paused` nothing is due.
    """

    def __init__(self) -> None:
        self.is_paused = False
        least_s = _seconds(LEAST_STEP_VARIABLE, Limits.least_s)
        self._judge = EngineJudge(
            Limits(least_s=least_s, most_s=max(least_s, _seconds(MOST_STEP_VARIABLE, Limits.most_s)))
        )
        self._is_judged = least_s > 0
        self._due = 0

    def fault(self, app: Any) -> str:
        """Return why the engine does not work; "" while it works, or nothing is known of it."""
        now_s = time.monotonic()
        if self._is_judged and self._judge.is_due(now_s):
            try:
                seen = see(app) if not self.is_paused else EngineLook()
            except Exception as error:
                _log.warning(
                    "hpc-serve cannot see the requests of this vLLM (%s: %s): a hung engine is not noticed.",
                    *(type(error).__name__, error),
                )
                self._is_judged = False
                return ""
            self._due = seen.due
            self._judge.look(seen, read_processes, now_s)
        return self._judge.fault if self._is_judged else ""

    def words(self, app: Any) -> str:
        """Return why the engine does not work, or whether it is `paused`, `busy` or `idle`."""
        return self.fault(app) or (
            "paused" if self.is_paused else "busy" if self._due or not self._is_judged else "idle"
        )


def see(app: Any) -> EngineLook:
    """Return what vLLM's objects say now. Raises AttributeError, or another error, where they are others."""
    engine = app.state.engine_client
    if (registry := sys.modules.get("prometheus_client")) is None:
        return EngineLook()
    config, requests = engine.vllm_config, engine.output_processor.request_states
    parallel = config.parallel_config
    is_here = parallel.nnodes == 1 and parallel.data_parallel_size == parallel.data_parallel_size_local
    return EngineLook(
        due=len(requests),
        unread_tokens=sum(one.prompt_len for one in requests.values() if one.is_prefilling),
        counters=_read_counters(registry),
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        rates=dict(_prompt_rates(requests.items())),
        # A rank of another kind of device may sleep through a step.
        ranks_burn_cpu_here=is_here
        and parallel.distributed_executor_backend in ("mp", "uni", None)
        and config.device_config.device_type in ("cuda", "cpu"),
    )


def read_adapters_once(app: Any) -> None:
    """Have vLLM read each adapter once: it keeps `load_inplace` in what it knows of an adapter, and would read the
    files again at every step (seen with 0.32; pull request 36373 of vLLM)."""
    models = getattr(getattr(app, "state", None), "openai_serving_models", None)
    for adapter in getattr(models, "lora_requests", {}).values():
        adapter.load_inplace = False


def read_processes() -> dict[int, Process]:
    """Return the processes below `vllm serve` but its API servers, by their number."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    parent = multiprocessing and multiprocessing.parent_process()
    found: dict[int, Process] = {}
    left = [os.getpid() if parent is None or parent.pid is None else parent.pid]
    while left:
        for pid in _children(left.pop()):
            process = _read_process(pid)
            if process is None or pid in found:
                continue
            left.append(pid)
            if pid != os.getpid() and not process.name.startswith(_API_SERVER):
                found[pid] = process
    return found


def _read_counters(prometheus: Any) -> tuple[float, ...] | None:
    """Return the engine's counters of steps; None if it counts none (--disable-log-stats)."""
    registry = prometheus.REGISTRY.restricted_registry(_COUNTERS)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # of an engine with several API servers
        registry = prometheus.CollectorRegistry()
        sys.modules["prometheus_client.multiprocess"].MultiProcessCollector(registry)
    samples = (sample for metric in registry.collect() for sample in metric.samples if sample.name in _COUNTERS)
    return tuple(sample.value for sample in samples) or None


def _prompt_rates(requests: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    for name, one in requests:
        stats = one.stats
        if not one.is_prefilling and stats is not None and one.prompt_len >= _LEAST_PROMPT_TOKENS:
            seconds = stats.first_token_ts - stats.scheduled_ts
            if seconds > 0:
                yield name, one.prompt_len / seconds


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue


def _read_process(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            before, _, after = file.read().rpartition(b")")
    except OSError:
        return None
    fields = after.split()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Process(name=before.partition(b"(")[2].decode(errors="replace"), state=fields[0].decode(), cpu_s=cpu_s)


def _seconds(variable: str, default: float) -> float:
    try:
        return float(os.environ.get(variable, default))
    except ValueError:
        return default
