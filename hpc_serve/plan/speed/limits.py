"""Says at which tensor parallel size communication takes longer than arithmetic.

The closed formulas are from "How To Scale Your Model", parts 7 and 8 (jax-ml.github.io/scaling-book).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_serve.plan.hardware.accelerator import AcceleratorSpec, slice_with, split_axes
from hpc_serve.plan.speed.step import IDEAL, Roofline

_LINKS_BY_DIMENSIONS = {2: 4, 3: 6}


def limit_lines(roofline: Roofline) -> Iterator[str]:
    """Yield a sentence: whether communication or FLOP/s take longer in a full step. None for one GPU."""
    gpu, model, width = roofline.accelerator, roofline.model, roofline.layout.tensor_parallel_size
    inner = model.intermediate_size or model.moe_intermediate_size
    if gpu.slices and inner and width > 1:
        topology = slice_with(gpu, width)
        used = split_axes(topology) if topology else 1
        limit = model_parallel_limit(gpu, inner, used)
        verdict = "communication takes longer" if width > limit else "FLOP/s take longer"
        yield (
            f"Full batches over {topology or width} chips: F·axes ÷ (C ÷ W_ici) = {inner:,} x {used} ÷ "
            f"{inner * used / limit:,.0f} = {limit:.0f}; at {width}, {verdict}."
        )
    elif width > 1:
        step = roofline.step(roofline.max_num_batched_tokens, 0, 1, IDEAL)
        verdict = "communication takes longer" if step.communication_s > step.flops_s else "FLOP/s take longer"
        yield (
            f"A full step of {roofline.max_num_batched_tokens:,} tokens at TP={width}, ideally: "
            f"{1000 * step.communication_s:.1f} ms of all-reduces, {1000 * step.flops_s:.1f} ms of FLOP/s: {verdict}."
        )


def axis_bytes_per_s(accelerator: AcceleratorSpec) -> float:
    """Return the bytes per second along one axis of a torus, both directions together."""
    assert accelerator.link_bytes_per_s
    dimensions = len(accelerator.slices[0].split("x"))
    return 2 * accelerator.link_bytes_per_s / _LINKS_BY_DIMENSIONS[dimensions]


def model_parallel_limit(accelerator: AcceleratorSpec, intermediate_size: int, over_axes: int) -> float:
    """Return the most chips for a large batch before the links take longer than arithmetic: F·axes ÷ (C ÷ W_ici)."""
    return intermediate_size * over_axes / (accelerator.dense_flops["bf16"] / axis_bytes_per_s(accelerator))
