"""Reads the engine's /metrics, in Prometheus' text format. Pure: others decide who asks, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_PROMPT_TOKENS, _GENERATION_TOKENS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_CACHE_USE = "vllm:kv_cache_usage_perc"
_RUNNING, _WAITING = _UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})? +(?P<value>\S+)")


def requests_under_way(text: str) -> int | None:
    """Return how many requests run or wait, in all of the engine's parts; None if the metrics do not say.

    >>> requests_under_way('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="0"} 1.0\\n')
    3
    """
    total = _total(_sums(text), _UNDER_WAY)
    return None if total is None else int(total)


def requests_running_and_waiting(text: str) -> tuple[int, int] | None:
    """Return how many requests run, and how many wait; None if the metrics do not say."""
    sums = _sums(text)
    running, waiting = _total(sums, [_RUNNING]), _total(sums, [_WAITING])
    return None if running is None or waiting is None else (int(running), int(waiting))


@dataclass(frozen=True, kw_only=True)
class EngineWork:
    """The work of an engine, over all of its parts. None stands for a figure that its metrics lack.

    `running` and `waiting` are requests. The tokens are counted since the engine started. `cache_use` is the share of
    the KV cache that is in use, in the fullest part of the engine.
    """

    running: int | None = None
    waiting: int | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cache_use: float | None = None


def read_work(text: str) -> EngineWork:
    """Return the work of an engine by its metrics.

    >>> read_work('vllm:num_requests_running{engine="0"} 2.0\\nvllm:kv_cache_usage_perc{engine="0"} 0.25\\n')
    EngineWork(running=2, waiting=None, prompt_tokens=None, generation_tokens=None, cache_use=0.25)
    """
    sums = _sums(text)
    running, waiting, prompt, generation = (
        _total(sums, [name]) for name in (_RUNNING, _WAITING, _PROMPT_TOKENS, _GENERATION_TOKENS)
    )
    uses = [value for name, value in _samples(text) if name == _CACHE_USE and math.isfinite(value)]
    return EngineWork(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        prompt_tokens=prompt,
        generation_tokens=generation,
        cache_use=max(uses, default=None),
    )


def _sums(text: str) -> dict[str, float]:
    """Return the sum of all samples of each metric."""
    sums: dict[str, float] = {}
    for name, value in _samples(text):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            yield found["name"], _number(found["value"])


def _total(sums: Mapping[str, float], names: Iterable[str]) -> float | None:
    """Return the sum of the metrics `names`; None if one of them has no sample."""
    values = [sums.get(name) for name in names]
    return None if any(value is None or not math.isfinite(value) for value in values) else sum(v or 0.0 for v in values)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
