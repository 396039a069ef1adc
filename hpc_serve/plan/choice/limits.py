"""Searches for limits: the longest context that a layout holds, and the fewest GPUs on which a model starts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import Workload
from hpc_serve.plan.memory.kv_cache import full_context_bytes

CONTEXT_STEP = 1024
"""Contexts are looked for in steps of so many tokens, and the model's own is tried too."""
AT_ONCE = (1, 4, 16, 64)
Contexts: TypeAlias = dict[Layout, dict[int, int]]
"""The longest context of each layout, by the number of requests of that length at once. 0: none of a step fits."""


def longest_context(inputs: PlanInputs, layout: Layout) -> int:
    """Return the longest context that fits for the requests asked for, at most that of `inputs`.

    0: none of a step fits.
    """
    whole = inputs.max_model_len
    inputs = replace(inputs, workload=replace(inputs.workload, request_tokens=None))
    if inputs.fits(layout):
        return whole
    steps = range(CONTEXT_STEP, whole, CONTEXT_STEP)
    fitting = bisect_left(steps, True, key=lambda tokens: not replace(inputs, max_model_len=tokens).fits(layout))
    return fitting * CONTEXT_STEP


def contexts_of(inputs: PlanInputs, layouts: Iterable[Layout]) -> Contexts:
    """Return the longest contexts of those layouts that hold any, for several numbers of requests at once."""
    found: Contexts = {}
    for layout in layouts:
        lengths: dict[int, int] = {}
        longest = inputs.max_model_len
        for count in AT_ONCE:
            asked = replace(inputs, workload=replace(inputs.workload, concurrency=count), max_model_len=longest)
            lengths[count] = longest = longest_context(asked, layout) if longest else 0
        if lengths[AT_ONCE[0]]:
            found[layout] = lengths
    return found


@dataclass(frozen=True, kw_only=True)
class MinimumGpus:
    """GPUs by their label's bytes (80e9 for an H100): for the weights, and for weights and one longest request.

    `usable` is the smallest number on which vLLM starts with any sizes. None: not on as many as were tried.
    """

    weights: int
    full_context: int
    usable: int | None


def minimum_gpus(inputs: PlanInputs, *, at_most: int) -> MinimumGpus:
    """Return the three figures. The search for `usable` ends at `at_most` GPUs.

    >>> from hpc_serve.plan import ClusterSpec, EngineConfig, accelerator, model_from_config, resolve
    >>> model = model_from_config(resolve("70b").config, name="70b")
    >>> h100 = ClusterSpec(accelerator=accelerator("h100-80gb"))
    >>> asked = PlanInputs(
    ...     model=model, cluster=h100, engine=EngineConfig(), workload=Workload(), max_model_len=131072
    ... )
    >>> minimum_gpus(asked, at_most=4)
    MinimumGpus(weights=2, full_context=3, usable=3)
    """
    label = inputs.cluster.accelerator.label_bytes
    weights = inputs.model.weight_bytes
    context = full_context_bytes(inputs.model, inputs.engine, inputs.max_model_len)
    return MinimumGpus(
        weights=-(-weights // label),
        full_context=-(-(weights + context) // label),
        usable=_usable(inputs, range(max(1, weights // label), at_most + 1)),
    )


def _usable(inputs: PlanInputs, counts: range) -> int | None:
    one_request = replace(inputs, workload=Workload())
    model = inputs.model
    for gpus in counts:
        for width in range(min(gpus, inputs.cluster.node_size), 0, -1):
            if gpus % width or model.num_attention_heads % width or gpus // width > model.num_hidden_layers:
                continue
            if one_request.fits(Layout(tensor_parallel_size=width, pipeline_parallel_size=gpus // width)):
                return gpus
    return None
