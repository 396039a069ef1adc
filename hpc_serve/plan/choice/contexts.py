"""The longest context that a layout holds, for one request and for several at once.

candidates.py decides whether one context fits. This module looks for the longest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout, layouts_on

CONTEXT_STEP = 1024
"""Contexts are looked for in steps of so many tokens, and the model's own is tried too."""
AT_ONCE = (1, 4, 16, 64)


@dataclass(frozen=True, kw_only=True)
class LayoutContexts:
    """The longest context of a layout by the number of requests of that length at once. 0: none of a step fits."""

    layout: Layout
    by_requests: tuple[tuple[int, int], ...]


def longest_context(inputs: PlanInputs, layout: Layout) -> int:
    """Return the longest context that fits for the requests asked for, at most that of `inputs`.

    0: none of a step fits.
    """
    whole = inputs.max_model_len
    inputs = replace(inputs, workload=replace(inputs.workload, request_tokens=None))
    if inputs.fits(layout):
        return whole
    low, high = 0, (whole - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if replace(inputs, max_model_len=middle * CONTEXT_STEP).fits(layout) else (low, middle - 1)
        )
    return low * CONTEXT_STEP


def contexts_by_layout(inputs: PlanInputs, num_nodes: int) -> list[LayoutContexts]:
    """Return the longest contexts of every layout on so many nodes that holds any, for several numbers of requests at
    once."""
    return contexts_of(inputs, layouts_on(num_nodes, inputs.cluster, inputs.engine))


def contexts_of(inputs: PlanInputs, layouts: Iterable[Layout]) -> list[LayoutContexts]:
    """Return the longest contexts of those layouts that hold any."""
    found = []
    for layout in layouts:
        lengths: list[tuple[int, int]] = []
        for count in AT_ONCE:
            longest = lengths[-1][1] if lengths else inputs.max_model_len
            asked = replace(inputs, workload=replace(inputs.workload, concurrency=count))
            lengths.append((count, longest_context(replace(asked, max_model_len=longest), layout) if longest else 0))
        if lengths[0][1]:
            found.append(LayoutContexts(layout=layout, by_requests=tuple(lengths)))
    return found
