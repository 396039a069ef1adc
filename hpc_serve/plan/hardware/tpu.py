"""TPU slices, and the closed formulas of how far model parallelism is of use.

The formulas are from "How To Scale Your Model", parts 7 and 8 (jax-ml.github.io/scaling-book). speed/ has the estimate
step by step.
"""

from __future__ import annotations

import math

from hpc_serve.plan.hardware.accelerator import AcceleratorSpec

_LINKS_BY_DIMENSIONS = {2: 4, 3: 6}


def chip_count(topology: str) -> int:
    """Return the chips of a slice.

    >>> chip_count("4x4")
    16
    """
    return math.prod(int(side) for side in topology.split("x"))


def same_slice(topology: str, known: tuple[str, ...]) -> str | None:
    """Return the slice of that list with these sides in any order, or None.

    >>> same_slice("4x2", ("2x2", "2x4"))
    '2x4'
    """
    return next((name for name in known if sorted(name.split("x")) == sorted(topology.split("x"))), None)


def split_axes(topology: str) -> int:
    """Return how many sides of a slice have more than one chip. A model can be split along these."""
    return sum(int(side) > 1 for side in topology.split("x"))


def slice_with(accelerator: AcceleratorSpec, count: int) -> str | None:
    """Return the topology with exactly so many chips, or None."""
    return next((name for name in accelerator.slices if chip_count(name) == count), None)


def is_offered(accelerator: AcceleratorSpec, count: int) -> bool:
    """Return whether so many make one machine. GPUs come in any number, TPU chips in the numbers of slices."""
    return accelerator.kind != "tpu" or slice_with(accelerator, count) is not None


def critical_batch(accelerator: AcceleratorSpec, compute: str, bytes_per_weight: float) -> float:
    """Return the batch at which arithmetic on a matrix takes as long as loading it: C ÷ W_hbm × bytes ÷ 2."""
    assert accelerator.bandwidth_bytes_per_s
    return accelerator.dense_flops[compute] / accelerator.bandwidth_bytes_per_s * bytes_per_weight / 2


def axis_bytes_per_s(accelerator: AcceleratorSpec) -> float:
    """Return the bytes per second along one axis of a torus, both directions together."""
    assert accelerator.link_bytes_per_s
    dimensions = len(accelerator.slices[0].split("x"))
    return 2 * accelerator.link_bytes_per_s / _LINKS_BY_DIMENSIONS[dimensions]


def model_parallel_limit(accelerator: AcceleratorSpec, intermediate_size: int, over_axes: int) -> float:
    """Return the most chips for a large batch before the links take longer than arithmetic: F·axes ÷ (C ÷ W_ici)."""
    return intermediate_size * over_axes / (accelerator.dense_flops["bf16"] / axis_bytes_per_s(accelerator))
