"""How fast requests are answered where so many are always in flight: when one is answered, the next one comes.

step.py decides how long a step takes. This module decides how requests share steps and how long they wait.
"""

from __future__ import annotations

import math

from hpc_serve.plan.speed.step import IDEAL, Factors, Roofline, StepTime
from hpc_serve.plan.speed.traffic import Speed, Traffic


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
