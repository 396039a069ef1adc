"""Reads the engine's /metrics, in Prometheus' text format. Pure: others decide who asks, and when."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_COUNTED = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
)
_CACHE_USE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})? +(?P<value>\S+)")


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

    @property
    def requests(self) -> int | None:
        """Requests that run or wait; None if the metrics do not say."""
        return None if self.running is None or self.waiting is None else self.running + self.waiting


def read_work(text: str) -> EngineWork:
    """Return the work of an engine by its metrics.

    >>> read_work('vllm:num_requests_running{engine="0"} 2.0\\nvllm:kv_cache_usage_perc{engine="0"} 0.25\\n')
    EngineWork(running=2, waiting=None, prompt_tokens=None, generation_tokens=None, cache_use=0.25)
    """
    samples: dict[str, list[float]] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            samples.setdefault(found["name"], []).append(_number(found["value"]))
    running, waiting, prompt, generation = (_total(samples.get(name)) for name in _COUNTED)
    return EngineWork(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        prompt_tokens=prompt,
        generation_tokens=generation,
        cache_use=max(filter(math.isfinite, samples.get(_CACHE_USE, ())), default=None),
    )


def _total(values: Iterable[float] | None) -> float | None:
    """Return the sum of a metric's samples; None without any, or where the sum is no number."""
    total = math.nan if values is None else sum(values)
    return total if math.isfinite(total) else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
