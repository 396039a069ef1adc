"""What the engine's /metrics says, in Prometheus' text format. Pure: who asks, and when, is decided elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# What vLLM counts in the engine's own process, a step of its scheduler at a time. The use of the cache grows with each
# part of a long prompt, the number of tokens read only when a prompt is complete. How many requests run and wait is
# not among them: other engines count those where requests arrive.
_STEPS = (
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"),
    "vllm:kv_cache_usage_perc",
)
_RUNNING, _WAITING = _UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})? +(?P<value>\S+)")


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """What an engine says of its work. `under_way` requests run or wait. `steps` differ whenever it has made a step."""

    under_way: int
    steps: tuple[float | None, ...]


def read_figures(text: str) -> EngineFigures | None:
    """The figures of an engine, summed over its parts; None if it does not count its tokens."""
    sums = _sums(text)
    under_way = _total(sums, _UNDER_WAY)
    steps = tuple(sums.get(name) for name in _STEPS)
    if under_way is None or not any(value is not None for value in steps):
        return None
    return EngineFigures(under_way=int(under_way), steps=steps)


def requests_under_way(text: str) -> int | None:
    """How many requests run or wait, in all of the engine's parts; None if the metrics do not say.

    >>> requests_under_way('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="0"} 1.0\\n')
    3
    """
    total = _total(_sums(text), _UNDER_WAY)
    return None if total is None else int(total)


def requests_running_and_waiting(text: str) -> tuple[int, int] | None:
    """How many requests run, and how many wait; None if the metrics do not say."""
    sums = _sums(text)
    running, waiting = _total(sums, [_RUNNING]), _total(sums, [_WAITING])
    return None if running is None or waiting is None else (int(running), int(waiting))


def _sums(text: str) -> dict[str, float]:
    """The sum of all samples of each metric."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            sums[found["name"]] = sums.get(found["name"], 0.0) + _number(found["value"])
    return sums


def _total(sums: Mapping[str, float], names: Iterable[str]) -> float | None:
    """The sum of the metrics `names`; None if one of them has no sample."""
    values = [sums.get(name) for name in names]
    return None if any(value is None or not math.isfinite(value) for value in values) else sum(v or 0.0 for v in values)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
