"""How fast the requests of a replica are answered, with one formula for each way in which they arrive.

- Generation alone, with prompts read elsewhere: a step gives each running request one token. This is the roofline of
  "How To Scale Your Model", part 7 (jax-ml.github.io/scaling-book/inference).
- Steady arrivals: so many are always in flight, and when one is answered, the next one comes.
- A burst: all arrive at once. The batch fills, is steady while requests wait, and then shrinks.

step.py decides how long a step takes, estimate.py how many requests run at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.speed.step import IDEAL, Factors, Roofline, StepTime
from hpc_serve.units import at_least_one


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests that one replica gets: tokens in and out of each, and how many there are.

    Steady arrivals keep `concurrency` requests in flight: when one is answered, the next one comes. In a burst
    `concurrency` requests arrive at once, and no more come. `longest_output_tokens` says that the answers of a burst
    differ in length: they have `output_tokens` on average and at most `longest_output_tokens`. None: all have the same
    length. `decode_only`: the prompts are in the cache already, and reading them takes no time. `prefix_hits` is the
    share of each prompt that is in the cache, because an earlier request began with it. `acceptance_length` is how many
    tokens a step gives a request on average, with the drafts that the model accepts (vLLM's "mean acceptance length");
    1 without speculation. Without `generates` a request is a text to embed or to score: it has one output token, which
    stands for the answer.
    """

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 1
    arrivals: Arrivals = "steady"
    longest_output_tokens: int | None = None
    decode_only: bool = False
    prefix_hits: float = 0.0
    acceptance_length: float = 1.0
    generates: bool = True

    def __post_init__(self) -> None:
        at_least_one(input_tokens=self.input_tokens, output_tokens=self.output_tokens, concurrency=self.concurrency)
        if self.arrivals not in get_args(Arrivals):
            raise InvalidRequestError(f"arrivals is {self.arrivals!r}: use {' or '.join(get_args(Arrivals))}.")
        if self.decode_only and self.arrivals == "burst":
            raise InvalidRequestError(
                "decoding alone has no arrivals, since prompts are read elsewhere: leave out --requests or "
                "--arrivals burst, or --decode-only."
            )
        if not 0 <= self.prefix_hits < 1 or (self.prefix_hits and self.decode_only):
            raise InvalidRequestError(
                f"prefix_hits is {self.prefix_hits:g}: it must be a share from 0 to less than 1, without --decode-only."
            )
        longest = self.longest_output_tokens
        if longest is not None and longest < self.output_tokens:
            raise InvalidRequestError(
                f"longest_output_tokens is {longest}, but answers have {self.output_tokens} tokens on average: it "
                "must be at least that."
            )

    @property
    def read_tokens(self) -> float:
        """Tokens of a prompt that are read: one at least, from whose output the answer follows."""
        return max(1.0, self.input_tokens * (1 - self.prefix_hits))

    @property
    def cached_tokens(self) -> float:
        """Tokens of a prompt that are in the cache."""
        return self.input_tokens - self.read_tokens

    @property
    def output_steps(self) -> float:
        """Steps that generate an answer, on average: one at least."""
        return max(1.0, self.output_tokens / self.acceptance_length)

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
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float

    @property
    def bound(self) -> str:
        """The cause of most of the time, prompts included."""
        return max(self.causes, key=lambda cause: self.causes[cause])


# -- generation alone

_MOST_BATCH = 1 << 20
"""The search for a critical batch ends at this number of requests."""


def decode_speed(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """Return one column of an estimate: `batch` requests run, the others wait. The first token comes with a step."""
    step = roofline.decode(batch, traffic.mean_context, factors)
    requests_per_s = batch / (step.total_s * traffic.output_steps)
    queue_s = (traffic.concurrency - batch) / requests_per_s
    time = sum(step.causes.values())
    return Speed(
        step=step,
        causes={cause: seconds / time for cause, seconds in step.causes.items()},
        queue_s=queue_s,
        ttft_s=queue_s + step.total_s,
        tpot_s=step.total_s / traffic.acceptance_length,
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * traffic.output_tokens,
    )


def critical_batch(roofline: Roofline) -> int | None:
    """Return the requests from which on a step's FLOP/s take longer than reading its weights, both ideal. None: never.

    The context does not change the number. For a dense model on one GPU the number is bytes of a weight x FLOP/s / (2 x
    bandwidth).
    """

    def is_reached(batch: int) -> bool:
        step = roofline.decode(batch, 1, IDEAL)
        return step.flops_s >= step.weights_s

    batches = range(1, _MOST_BATCH + 1)
    found = bisect_left(batches, True, key=is_reached)
    return batches[found] if found < _MOST_BATCH else None


# -- steady arrivals


def steady_speed(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """Return one column of an estimate: `batch` requests run, the others in flight wait.

    A round serves all running requests once. It takes as many steps as generate an answer, or more if the prompts need
    more. Each prompt has its own steps, together with the tokens of other requests. Prompts share steps if
    there are too few steps. Data-parallel ranks step together, so each waits in the steps in which another one reads a
    prompt. The batches in the pipeline stages wait likewise, because none overtakes another one. In a burst of answers
    of one length, requests that begin together end together. The next prompts then follow one another, and no batch
    waits. Throughput, waiting and time between tokens follow by Little's law.
    """
    inputs, each, context = traffic.read_tokens, traffic.output_steps, traffic.mean_context
    cached = traffic.cached_tokens
    stages, ranks = roofline.layout.pipeline_parallel_size, roofline.layout.data_parallel_size
    in_flight = min(float(stages), batch)
    scheduled = inputs + roofline.tokens_per_sequence * each
    steps = max(each, batch / in_flight * scheduled / roofline.max_num_batched_tokens)
    decoding = batch * each / steps
    chunks = math.ceil(inputs / roofline.max_num_batched_tokens)
    decode = roofline.decode(decoding, context, factors)

    def round_of(own: float) -> tuple[float, float, StepTime]:
        """Return (time, steps in which any batch has prompts, one of them), with prompts in `own` steps of a batch."""
        with_prompts = steps * (1 - (1 - own / steps) ** (ranks * apart))
        tokens = decoding + stages / in_flight * batch * inputs / own
        reading = own / steps / (1 - (1 - own / steps) ** ranks)
        mixed = roofline.step(tokens, decoding, context, factors, inputs, reading, cached)
        return with_prompts * mixed.total_s + (steps - with_prompts) * decode.total_s, with_prompts, mixed

    apart = 1.0 if traffic.arrivals == "burst" and traffic.longest_output_tokens is None else in_flight
    own = min(steps, batch / apart * max(chunks, inputs / roofline.max_num_batched_tokens))
    round_s, with_prompts, mixed = round_of(own)
    if factors is IDEAL:
        round_s = min(round_s, round_of(steps)[0])
    beside = batch - 1
    alone = roofline.step(stages * inputs / chunks + beside, beside, context, factors, inputs, 1 / ranks, cached)
    prefill_s = alone.pass_s + (chunks - 1) / stages * alone.total_s
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
        ttft_s=queue_s + first_s,
        tpot_s=max(
            decode.total_s / traffic.acceptance_length, (round_s - prefill_s) / max(1, traffic.output_tokens - 1)
        ),
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * traffic.output_tokens,
    )


# -- what arrives at once

_SHRINK_RATIO = 1.5
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
    tpot_s += max(0.0, fill.seconds - ttft_s) / max(1, outputs - 1)
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
def share_ending_per_step(mean: float, longest: float) -> float:
    """Return the share of answers that end at each step. Lengths are geometric with that mean, cut off at `longest`.

    Solves mean = (1 - exp(-r·longest)) ÷ r. 0 where all answers have the longest length.
    """
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
    """Return the steps of requests that begin together: first steps that read prompts, then steps that answer.

    No request joins the batch, and a share of `ends` ends at each step. The requests fill as many batches for the
    pipeline stages as their prompts had steps: vLLM's scheduler keeps requests together whose prompts shared a step
    (github.com/vllm-project/vllm/issues/50853). V0 divided them.
    """
    chunks = math.ceil(first * traffic.read_tokens / roofline.max_num_batched_tokens)
    stages, context = roofline.layout.pipeline_parallel_size, traffic.mean_context
    uneven = stages / (stages if roofline.engine.is_v0 else min(stages, chunks))
    found = [read_prompts(roofline, traffic, first, factors)]
    if not ends:
        step = roofline.decode(uneven * first, context, factors)
        return [*found, Stretch(steps=traffic.output_steps, requests=first, step=step)]
    longest = (traffic.longest_output_tokens or math.inf) / traffic.acceptance_length
    left, done = first, 0.0
    while left >= 1 and done < longest:
        steps = min(math.log(_SHRINK_RATIO) / ends, longest - done)
        running = left / math.sqrt(_SHRINK_RATIO)
        found.append(Stretch(steps=steps, requests=running, step=roofline.decode(uneven * running, context, factors)))
        left /= _SHRINK_RATIO
        done += steps
    return found
