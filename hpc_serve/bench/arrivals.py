"""When requests are sent: all at once, or at a rate. The formula is that of `vllm bench serve` (its `get_request`)."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each of `count` requests is sent, in seconds from the beginning.

    The times between them follow a gamma distribution with the mean 1/`rate` and the shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is even, inf is a clock. They are scaled so that the last one is sent at
    count/rate: different seeds have the same load.

    >>> arrival_times(3, math.inf, 1.0, seed=0)
    [0.0, 0.0, 0.0]
    >>> arrival_times(3, 2.0, math.inf, seed=0)
    [0.5, 1.0, 1.5]
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(place + 1) / rate for place in range(count)]
    chance = random.Random(f"arrivals {seed}")
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += chance.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now_s)
    return [time_s * (count / rate) / now_s for time_s in times] if now_s else times
