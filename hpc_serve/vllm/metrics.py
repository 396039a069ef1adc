"""What the engine's /metrics says, in Prometheus' text format. Pure: who asks, and when, is decided elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})? +(?P<value>\S+)")


def requests_under_way(text: str) -> int | None:
    """How many requests run or wait, in all of the engine's parts; None if the metrics do not say.

    >>> requests_under_way('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="0"} 1.0\\n')
    3
    """
    total = sum_of(text, _UNDER_WAY)
    return None if total is None else int(total)


def sum_of(text: str, names: Iterable[str]) -> float | None:
    """The sum of all samples of the metrics `names`; None if one of them has no sample."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            sums[found["name"]] = sums.get(found["name"], 0.0) + _number(found["value"])
    values = [sums.get(name) for name in names]
    return None if any(value is None or not math.isfinite(value) for value in values) else sum(v or 0.0 for v in values)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
