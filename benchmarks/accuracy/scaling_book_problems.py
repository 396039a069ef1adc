"""Answers to the chapter's worked problems 1 to 3, computed, with the reasoning. The chapter has no answers.

`python -m benchmarks.accuracy.scaling_book` prints them below the table of the chapter's figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap

from benchmarks.accuracy.scaling_book import (
    BANDWIDTH,
    CHIP_BYTES,
    CONTEXT,
    FLOPS,
    INT8_CACHE,
    LARGE,
    SMALL,
    V5E,
    pooled,
    smallest_slice,
    weights,
)
from benchmarks.accuracy.scaling_book import tensor_parallel as tensor
from hpc_serve.plan import EngineConfig
from hpc_serve.plan.hardware import chip_count
from hpc_serve.plan.memory.kv_cache import full_context_bytes
from hpc_serve.plan.speed.step import EXPECTED, IDEAL, Roofline, model_parallel_limit

LIMIT_S = 0.015
LARGE_TOKEN, SMALL_TOKEN = (full_context_bytes(model, INT8_CACHE, 1) for model in (LARGE, SMALL))
WIDTH = 53248
"""The inner size of the 405B's MLPs."""


@dataclass(frozen=True, kw_only=True)
class First:
    """405B in bf16, one token on N chips. Seconds of FLOPs and loading are divided by N, those of links are not."""

    flops: float
    flops_s: float
    loading_s: float
    links_s: float
    links_bind_one_sequence: float
    links_bind_large_batch: float
    limit_of_the_book: float


def first() -> First:
    """Links: two all-reduces per layer over all four links of a chip, on 64 chips. On more, heads cannot be divided."""
    flops = 2.0 * LARGE.parameters
    flops_s, loading_s = flops / FLOPS, LARGE.weight_bytes / BANDWIDTH
    links_s = Roofline(LARGE, V5E, EngineConfig(), tensor(64)).decode(1, 1, IDEAL).communication_s
    return First(
        flops=flops,
        flops_s=flops_s,
        loading_s=loading_s,
        links_s=links_s,
        links_bind_one_sequence=loading_s / links_s,
        links_bind_large_batch=flops_s / links_s,
        limit_of_the_book=model_parallel_limit(V5E, WIDTH, 2),
    )


@dataclass(frozen=True, kw_only=True)
class Second:
    """8B with 240 sequences, all in int8: bytes, and the smallest slice by context."""

    weight_bytes: float
    position_bytes: float
    activation_bytes: float
    slices: dict[int, str]


def second() -> Second:
    """The widest activation is the MLP's inner one, in bf16."""
    position = 240.0 * SMALL_TOKEN
    size = weights("int8", SMALL)
    return Second(
        weight_bytes=size,
        position_bytes=position,
        activation_bytes=240 * 14336 * 2,
        slices={context: smallest_slice(V5E, size + context * position) for context in (128, 2048, CONTEXT)},
    )


@dataclass(frozen=True, kw_only=True)
class Third:
    """405B in int8 within 15 ms: where it fits, where it is fast enough, and the largest batch there at 8k."""

    holds: str
    holds_s: float
    slice: str
    least_s: float
    batch: int
    used_bytes: float
    links_s: float
    rate: float
    expected_s: float
    expected_alone_s: float
    starts_s: float


def third() -> Third:
    """Communication takes no extra time, as in the page's own code. The expected figures are those of real engines."""
    size, name = weights("int8", LARGE), "8x8"
    holds, count = smallest_slice(V5E, size), chip_count(name)
    roofline = pooled(count, LARGE)
    batch = max(one for one in range(1, 1024) if roofline.decode(one, CONTEXT, IDEAL).total_s <= LIMIT_S)
    alone = roofline.decode(1, CONTEXT, EXPECTED)
    return Third(
        holds=holds,
        holds_s=size / (chip_count(holds) * BANDWIDTH),
        slice=name,
        least_s=size / (count * BANDWIDTH),
        batch=batch,
        used_bytes=size + batch * CONTEXT * LARGE_TOKEN,
        links_s=batch * first().links_s,
        rate=batch / roofline.decode(batch, CONTEXT, IDEAL).total_s,
        expected_s=roofline.decode(batch, CONTEXT, EXPECTED).total_s,
        expected_alone_s=alone.total_s,
        starts_s=alone.engine_s,
    )


def answers() -> Iterator[str]:
    """The three answers as text."""
    one, two, three = first(), second(), third()
    told = {
        "Problem 1, 405B: FLOPs per token, least time of a forward pass on N chips": (
            f"2 × parameters = {one.flops:.3g} operations a token. Bound by FLOPs: {1000 * one.flops_s:.2f} ms ÷ N. "
            f"Bound by communication, which in the page's code is loading from HBM (`param_comms_time`): "
            f"{one.loading_s:.2f} s ÷ N in bf16, and this is what binds below a batch of 240. "
            f"The links (ICI) bind at first neither way: the all-reduces of a token, 2 in each of 126 layers, take "
            f"{1e6 * one.links_s:.0f} µs on any number of chips, so for a single token they exceed the loading from "
            f"N = {one.links_bind_one_sequence:,.0f} on. But they grow with the batch and do not shrink with N: once "
            f"FLOPs bind, they exceed them from N = {one.links_bind_large_batch:.0f} on (the book's F·axes ÷ 2,200 "
            f"says {one.limit_of_the_book:.0f}), and the least time is {1e6 * one.links_s:.0f} µs × batch."
        ),
        "Problem 2, 8B, batch 240, int8 weights and caches": (
            f"Weights {two.weight_bytes / 1e9:.2f} GB. Caches {SMALL_TOKEN:,} bytes a token and sequence, "
            f"{two.position_bytes / 1e6:.1f} MB for one position of all 240. Activations "
            f"{two.activation_bytes / 1e6:.1f} MB at the widest (240 × 14,336 × 2). The slice is a matter of context: "
            + ", ".join(
                f"{name} at {context:,} ({(two.weight_bytes + context * two.position_bytes) / 1e9:.0f} GB)"
                for context, name in two.slices.items()
            )
            + "."
        ),
        "Problem 3, 405B in int8 on v5e, at most 15 ms a token": (
            f"{three.holds} is the smallest that holds the weights, but takes {1000 * three.holds_s:.1f} ms to load "
            f"them. So {three.slice}, with a least step of {1000 * three.least_s:.1f} ms. At 8k of context "
            f"{three.batch} sequences end within the limit ({three.used_bytes / 1e9:.0f} of "
            f"{chip_count(three.slice) * CHIP_BYTES / 1e9:,.0f} GB): {three.rate:,.0f} tokens/s, "
            f"{three.rate / chip_count(three.slice):.0f} a chip. The links take {1000 * three.links_s:.1f} ms of those "
            f"15 and must hide entirely: 64 chips are all that they can feed at this batch. With the factors of the "
            f"expected column, fitted to GPUs, that step takes {1000 * three.expected_s:.0f} ms, and "
            f"{1000 * three.expected_alone_s:.0f} ms with one sequence, of which {1000 * three.starts_s:.0f} ms are "
            f"starts of kernels: 15 ms on 8x8 is a bound, not a promise."
        ),
    }
    for title, text in told.items():
        yield title
        yield from (f"  {line}" for line in wrap(text, 116))
