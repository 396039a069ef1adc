"""How fast a layout serves: time to the first token, time between tokens, tokens per second, and what limits them.

Every figure is given twice: ideally, which no engine can beat, and as expected of a real engine by `Factors`. step.py
decides how long a step takes. This module decides how long requests wait and how they share steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.memory.kv_cache import cache_layout
from hpc_serve.plan.speed.step import EXPECTED, FITTED, IDEAL, Factors, Roofline, StepTime, link_rate

__all__ = [
    "EXPECTED",
    "FITTED",
    "IDEAL",
    "Factors",
    "Roofline",
    "Speed",
    "SpeedEstimate",
    "StepTime",
    "Traffic",
    "burst_s",
    "estimate_speed",
    "link_rate",
    "requests_held",
    "running_requests",
    "share_ending_per_step",
    "steady_speed",
]

SHRINK_RATIO = 1.5
"""The time of a shrinking batch is summed over stretches, in each of which the batch shrinks by this factor."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests that one replica gets: tokens in and out of each, and how many are always in flight."""

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise InvalidRequestError(f"{field.name} is {value}: it must be at least 1.")

    @property
    def mean_context(self) -> float:
        """Tokens before a generated token, on average."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The figures of one column, ideal or expected. Times are of one request in seconds, rates of one replica.

    `step` generates a token for each running request. `causes` are shares of all the time, prompts included. `queue_s`
    is the wait until a request may run. `ttft_s` includes it, and the rest of the step that is running. `tpot_s`
    includes the prompts of other requests in between.
    """

    step: StepTime
    causes: dict[str, float]
    queue_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """The speed of one replica under some traffic.

    Of the requests in flight `batch` run, the others wait. The cache holds `capacity` of them.
    """

    traffic: Traffic
    num_gpus: int
    batch: float
    capacity: float
    ideal: Speed
    expected: Speed
    factors: Factors
    usd_per_gpu_hour: float | None = None

    @property
    def bound(self) -> str:
        """The cause of most of the expected time, prompts included."""
        causes = self.expected.causes
        return max(causes, key=lambda cause: causes[cause])

    @property
    def output_tokens_per_s_per_gpu(self) -> float:
        """Expected output tokens per second of each GPU."""
        return self.expected.output_tokens_per_s / self.num_gpus

    @property
    def output_tokens_per_usd(self) -> float | None:
        """Expected output tokens for a dollar. None without a price."""
        if not self.usd_per_gpu_hour:
            return None
        return self.output_tokens_per_s_per_gpu * 3600 / self.usd_per_gpu_hour


def estimate_speed(
    roofline: Roofline,
    traffic: Traffic,
    memory: MemoryEstimate,
    *,
    factors: Factors = EXPECTED,
    usd_per_gpu_hour: float | None = None,
) -> SpeedEstimate:
    """The speed of one replica under steady traffic.

    `memory` is that of the layout. Requests that the cache or vLLM's max_num_seqs cannot hold wait. A round serves all
    running requests once. It takes as many steps as a request has output tokens, or more where the prompts need more.
    Each prompt is read in steps of its own together with the tokens of others, and prompts share steps where there are
    too few. Throughput, waiting and time between tokens follow by Little's law.
    """
    capacity = requests_held(roofline, traffic, memory)
    batch = running_requests(roofline, traffic, capacity)
    return SpeedEstimate(
        traffic=traffic,
        num_gpus=roofline.layout.num_gpus,
        batch=batch,
        capacity=capacity,
        ideal=steady_speed(roofline, traffic, batch, IDEAL),
        expected=steady_speed(roofline, traffic, batch, factors),
        factors=factors,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )


def burst_s(
    roofline: Roofline,
    traffic: Traffic,
    batch: float,
    requests: int,
    *,
    factors: Factors = EXPECTED,
    lengths_vary: bool = False,
    longest: int | None = None,
) -> float:
    """Seconds until `requests` that arrive at once are answered: the batch fills, is steady, and then shrinks.

    While the batch fills, steps contain prompts only. `lengths_vary`: answers have geometric lengths of that mean, cut
    off at `longest` where it is given. They end at a constant rate, so the last ones run in small batches.
    """
    first = min(requests, batch)
    inputs, outputs, context = traffic.input_tokens, traffic.output_tokens, traffic.mean_context
    chunks = math.ceil(first * inputs / roofline.max_num_batched_tokens)
    fill_s = chunks * roofline.step(first * inputs / chunks, 0, context, factors, inputs).total_s
    turnover_s = 0.0
    if requests > first:
        turnover_s = (requests - first) / steady_speed(roofline, traffic, batch, factors).requests_per_s
    ends = share_ending_per_step(outputs, longest) if lengths_vary else 0.0
    if not ends:
        return fill_s + turnover_s + outputs * roofline.decode(first, context, factors).total_s
    shrink_s, left, done = 0.0, first, 0.0
    while left >= 1 and (longest is None or done < longest):
        steps = min(math.log(SHRINK_RATIO) / ends, (longest or math.inf) - done)
        shrink_s += steps * roofline.decode(left / math.sqrt(SHRINK_RATIO), context, factors).total_s
        left /= SHRINK_RATIO
        done += steps
    return fill_s + turnover_s + shrink_s


def share_ending_per_step(mean: float, longest: float | None) -> float:
    """The share of answers that end at each step. Lengths are geometric with that mean, cut off at `longest`.

    Solves mean = (1 - exp(-r·longest)) ÷ r. 0 where all answers have the longest length.
    """
    if longest is None:
        return 1 / mean
    low, high = 0.0, 1 / mean
    if mean >= 0.99 * longest:
        return low
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return high


def requests_held(roofline: Roofline, traffic: Traffic, memory: MemoryEstimate) -> float:
    """How many requests of the traffic's mean length the cache of a layout holds at once."""
    engine = roofline.engine
    ranks = roofline.layout.tensor_parallel_size
    layout = cache_layout(roofline.model, engine, ranks, kind=roofline.accelerator.kind)
    length = math.ceil(traffic.mean_context)
    blocks = layout.blocks_per_request(length, roofline.max_num_batched_tokens)
    return max(0, memory.num_blocks - 1) / blocks if blocks else math.inf


def running_requests(roofline: Roofline, traffic: Traffic, capacity: float) -> float:
    """How many of the requests in flight run at once: as many as the cache holds and max_num_seqs allows."""
    return max(1.0, min(traffic.concurrency, capacity, roofline.max_num_seqs))


def steady_speed(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """One column of an estimate: `batch` requests run under steady traffic."""
    inputs, outputs, context = traffic.input_tokens, traffic.output_tokens, traffic.mean_context
    steps = max(float(outputs), batch * (inputs + outputs) / roofline.max_num_batched_tokens)
    decoding = batch * outputs / steps
    chunks = math.ceil(inputs / roofline.max_num_batched_tokens)
    decode = roofline.decode(decoding, context, factors)

    def round_of(with_prompts: float) -> tuple[float, StepTime]:
        mixed = roofline.step(decoding + batch * inputs / with_prompts, decoding, context, factors, inputs)
        return with_prompts * mixed.total_s + (steps - with_prompts) * decode.total_s, mixed

    with_prompts = min(steps, max(batch * chunks, batch * inputs / roofline.max_num_batched_tokens))
    round_s, mixed = round_of(with_prompts)
    if factors is IDEAL:
        round_s = min(round_s, round_of(steps)[0])
    stages = roofline.layout.pipeline_parallel_size
    alone = roofline.step(stages * inputs / chunks + batch - 1, batch - 1, context, factors, inputs)
    prefill_s = (chunks + stages - 1) / stages * alone.total_s
    requests_per_s = batch / max(round_s, prefill_s)
    queue_s = (traffic.concurrency - batch) / requests_per_s
    # A request that arrives waits for the rest of the running step, more likely a long one. Its prompt shares a step.
    rest_s = (with_prompts * mixed.total_s**2 + (steps - with_prompts) * decode.total_s**2) / (2 * round_s)
    first_s = prefill_s if batch <= 1 or factors is IDEAL else rest_s + max(prefill_s, mixed.total_s)
    time = {
        cause: with_prompts * mixed.causes[cause] + (steps - with_prompts) * decode.causes[cause]
        for cause in decode.causes
    }
    return Speed(
        step=roofline.decode(batch, context, factors),
        causes={cause: seconds / sum(time.values()) for cause, seconds in time.items()},
        queue_s=queue_s,
        prefill_s=prefill_s,
        ttft_s=queue_s + first_s,
        tpot_s=max(decode.total_s, (round_s - prefill_s) / max(1, outputs - 1)),
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * outputs,
    )
