"""How fast answers are generated alone, with prompts read elsewhere: a step gives each running request one token.

This is the roofline of "How To Scale Your Model", part 7 (jax-ml.github.io/scaling-book/inference), and what a replica
for decoding does where other replicas read the prompts. step.py decides how long a step takes.
"""

from __future__ import annotations

from bisect import bisect_left

from hpc_serve.plan.speed.step import IDEAL, Factors, Roofline
from hpc_serve.plan.speed.traffic import Speed, Traffic

_MOST = 1 << 20


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

    batches = range(1, _MOST + 1)
    found = bisect_left(batches, True, key=is_reached)
    return batches[found] if found < _MOST else None
