"""How fast a layout serves: time to the first token and between tokens, tokens per second, and what bounds them.

Everything is given twice: as the ideal roofline, which no engine beats, and as expected of a real one by the few
factors of `Factors`. The time of a step is roofline_step.py's; here requests wait, fill steps and leave.
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

DRAIN_RATIO = 1.5
"""By how much the batch shrinks in each stretch over which a draining one is summed up."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is asked of one replica: requests of so many tokens in and out, `concurrency` of them always in flight."""

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
        """Tokens that a generated token looks back on, on average."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One column: ideal or expected. Times of a request in seconds, rates of one replica.

    `step` generates a token for each running request; `causes` are shares of all the time, prompts included. `queue_s`
    is waited before a place is free; `ttft_s` includes it and the rest of the step that runs; `tpot_s` includes the
    prompts of others between.
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
    """What to expect of one replica under some traffic. `batch` of the requests in flight run, the others wait;
    `capacity` is how many of them the cache holds."""

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
        """What most of the expected time goes to, prompts included."""
        causes = self.expected.causes
        return max(causes, key=lambda cause: causes[cause])

    @property
    def output_tokens_per_s_per_gpu(self) -> float:
        """Expected output tokens per second of each GPU."""
        return self.expected.output_tokens_per_s / self.num_gpus

    @property
    def output_tokens_per_usd(self) -> float | None:
        """Expected output tokens for a dollar, where a price is known."""
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
    """What one replica does under some traffic, in the steady state.

    `memory` is that of the layout. Requests beyond what the cache or vLLM's max_num_seqs holds wait. A round in which
    all running requests are served once takes as many steps as a request has output tokens, more if prompts need
    more; each prompt comes in steps of its own (shared where they do not suffice), along with the tokens of others.
    Throughput, waiting and time between tokens follow by Little's law.
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
    """Seconds until `requests` that come all at once are answered: the batch fills, turns over, and drains.

    While it fills, prompts are read with no tokens of others between. `lengths_vary`: answers end at a constant rate
    (geometric lengths of that mean, cut off at `longest` where given), so that the last ones run in ever smaller
    batches.
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
    drain_s, left, done = 0.0, first, 0.0
    while left >= 1 and (longest is None or done < longest):
        steps = min(math.log(DRAIN_RATIO) / ends, (longest or math.inf) - done)
        drain_s += steps * roofline.decode(left / math.sqrt(DRAIN_RATIO), context, factors).total_s
        left /= DRAIN_RATIO
        done += steps
    return fill_s + turnover_s + drain_s


def share_ending_per_step(mean: float, longest: float | None) -> float:
    """The share of answers that end at each step, where lengths are geometric of that mean but cut off at `longest`.

    Solves mean = (1 - exp(-r·longest)) ÷ r; 0 where all are as long as they may be.
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
    """Requests of the traffic's mean length that the cache of a layout holds at once."""
    engine = roofline.engine
    ranks = roofline.layout.tensor_parallel_size
    layout = cache_layout(roofline.model, engine, ranks, kind=roofline.accelerator.kind)
    length = math.ceil(traffic.mean_context)
    blocks = layout.blocks_per_request(length, roofline.max_num_batched_tokens)
    return max(0, memory.num_blocks - 1) / blocks if blocks else math.inf


def running_requests(roofline: Roofline, traffic: Traffic, capacity: float) -> float:
    """Requests that run at once, of those in flight: as many as the cache holds and max_num_seqs allows."""
    return max(1.0, min(traffic.concurrency, capacity, roofline.max_num_seqs))


def steady_speed(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """One column of an estimate: `batch` requests running in the steady state."""
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
    # Who comes waits for the rest of the step that runs, likelier a long one; its prompt shares a step with others'.
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
