"""How fast requests are answered that arrive at once, and no more come: the batch fills, is steady, and then shrinks.

step.py decides how long a step takes, steady.py how fast a full batch is while requests still wait.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from hpc_serve.plan.speed.steady import steady_speed
from hpc_serve.plan.speed.step import IDEAL, Factors, Roofline, StepTime
from hpc_serve.plan.speed.traffic import Speed, Traffic

SHRINK_RATIO = 1.5
"""The time of a shrinking batch is summed over stretches, in each of which the batch shrinks by this factor."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A number of equal steps, and how many requests each of them serves."""

    steps: float
    requests: float
    step: StepTime

    @property
    def seconds(self) -> float:
        return self.steps * self.step.total_s


def burst_speed(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """Return one column of an estimate: all requests arrive at once, `batch` of them can run, the others wait.

    While the batch fills, steps contain prompts only, and the server reads one request after the other. Answers of
    different lengths are geometric, cut off at the longest. They end at a constant rate, so the last ones run in small
    batches. Answers of one length run in rounds, and the last round has the rest of the requests.
    Times are means over the requests: `queue_s` until a request may run, `ttft_s` until its first token. The rates
    count from the arrival to the last token of all. The ideal rate is that of a batch that stays full.
    """
    requests, outputs, longest = traffic.concurrency, traffic.output_tokens, traffic.longest_output_tokens
    first = min(float(requests), batch)
    waiting = requests - first
    accepted = traffic.acceptance_length
    ends = 0.0 if longest is None else share_ending_per_step(traffic.output_steps, longest / accepted)
    fill, *drain = _round(roofline, traffic, first, factors, ends)
    full = steady_speed(roofline, traffic, batch, factors) if waiting or factors is IDEAL else None
    rounds, rest = divmod(waiting, batch) if longest is None else (waiting / batch, 0.0)
    last = _round(roofline, traffic, rest, factors, ends) if rest and factors is not IDEAL else []
    time: Counter[str] = Counter()
    for stretch in (fill, *drain, *last):
        for cause, seconds in stretch.step.causes.items():
            time[cause] += stretch.steps * seconds  # type: ignore[assignment]
    arriving_s = max(0.0, first * factors.request_s - fill.seconds) if traffic.generates else 0.0
    time["engine"] += arriving_s  # type: ignore[assignment]
    total_s = arriving_s + sum(stretch.seconds for stretch in (fill, *drain, *last))
    # The prompts of the first batch end one step after the other.
    ttft_s = fill.seconds - (fill.steps - 1) / 2 * fill.step.total_s + arriving_s / 2
    served = sum(stretch.steps * stretch.requests for stretch in drain)
    tpot_s = sum(stretch.seconds * stretch.requests for stretch in drain) / served / accepted
    tpot_s += (fill.seconds - ttft_s) / max(1, outputs - 1)
    queue_s = 0.0
    if full and waiting:
        turnover_s = (rounds * batch if last else waiting) / full.requests_per_s
        total_s += turnover_s
        for cause, share in full.causes.items():
            time[cause] += turnover_s * share  # type: ignore[assignment]
        wait_s = fill.seconds + turnover_s / 2
        queue_s = waiting * wait_s / requests
        ttft_s = (first * ttft_s + waiting * (wait_s + full.ttft_s - full.queue_s)) / requests
        tpot_s = (first * tpot_s + waiting * full.tpot_s) / requests
    requests_per_s = requests / total_s
    if full and factors is IDEAL:
        requests_per_s = max(requests_per_s, full.requests_per_s)
    return Speed(
        step=roofline.decode(batch, traffic.mean_context, factors),
        causes={cause: seconds / sum(time.values()) for cause, seconds in time.items()},
        queue_s=queue_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * outputs,
    )


@lru_cache(maxsize=512)
def share_ending_per_step(mean: float, longest: float | None) -> float:
    """Return the share of answers that end at each step. Lengths are geometric with that mean, cut off at `longest`.

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


def read_prompts(roofline: Roofline, traffic: Traffic, requests: float, factors: Factors) -> Stretch:
    """Return the steps that read the prompts of requests alone. They pass the pipeline stages one after the other."""
    inputs, stages = traffic.read_tokens, roofline.layout.pipeline_parallel_size
    chunks = math.ceil(requests * inputs / roofline.max_num_batched_tokens)
    tokens, cached = stages * requests * inputs / chunks, traffic.cached_tokens
    step = roofline.step(tokens, 0, traffic.mean_context, factors, inputs, cached_tokens=cached)
    return Stretch(steps=(chunks + stages - 1) / stages, requests=requests, step=step)


def _round(roofline: Roofline, traffic: Traffic, first: float, factors: Factors, ends: float) -> list[Stretch]:
    """Return the steps of requests that begin together: those that read their prompts, then those that answer."""
    chunks = math.ceil(first * traffic.read_tokens / roofline.max_num_batched_tokens)
    stages = roofline.layout.pipeline_parallel_size
    in_flight = stages if roofline.engine.is_v0 else min(stages, chunks)
    fill = read_prompts(roofline, traffic, first, factors)
    return [fill, *_drain(roofline, traffic, first, factors, ends, in_flight)]


def _drain(
    roofline: Roofline, traffic: Traffic, first: float, factors: Factors, ends: float, in_flight: int
) -> list[Stretch]:
    """Return the steps that generate the answers of a batch which no request joins.

    A share of `ends` ends at each step. The requests fill `in_flight` batches for the pipeline stages: vLLM's scheduler
    keeps requests together whose prompts shared a step (github.com/vllm-project/vllm/issues/50853). V0 divided them.
    """
    uneven = roofline.layout.pipeline_parallel_size / in_flight
    context = traffic.mean_context
    if not ends:
        step = roofline.decode(uneven * first, context, factors)
        return [Stretch(steps=traffic.output_steps, requests=first, step=step)]
    longest = (traffic.longest_output_tokens or math.inf) / traffic.acceptance_length
    found, left, done = [], first, 0.0
    while left >= 1 and done < longest:
        steps = min(math.log(SHRINK_RATIO) / ends, longest - done)
        running = left / math.sqrt(SHRINK_RATIO)
        found.append(Stretch(steps=steps, requests=running, step=roofline.decode(uneven * running, context, factors)))
        left /= SHRINK_RATIO
        done += steps
    return found
