"""Reads facts about the engine in the API server's process: from vLLM's own objects in this process, and from /proc.

Nothing of vLLM is imported. If a version of vLLM lacks a name that is read here, nothing counts as due. So no engine is
called hung for it, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from hpc_serve.gate.judgement import EngineLook, Judge, Limits, Process

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
        self._judge = Judge(Limits(least_s=least_s, most_s=max(least_s, _seconds(MOST_STEP_VARIABLE, Limits.most_s))))
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
