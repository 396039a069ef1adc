"""Compares one engine on a whole node with several engines that share it: how many tokens each option can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout, without_layout
from hpc_serve.plan.memory.estimate import MemoryEstimate

TYPICAL_REQUEST_TOKENS = 2048
"""The length of a request for comparing options."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A node shared by `replicas` engines of one layout, each with `memory` on its tightest GPU."""

    replicas: int
    layout: Layout
    memory: MemoryEstimate

    @property
    def total_tokens(self) -> int:
        """Tokens in the caches of all replicas."""
        return self.replicas * self.memory.kv_cache_tokens

    @property
    def typical_requests(self) -> int:
        """Requests of TYPICAL_REQUEST_TOKENS that all replicas hold at once."""
        return self.replicas * (self.memory.kv_cache_tokens // TYPICAL_REQUEST_TOKENS)


def replica_options(inputs: PlanInputs) -> list[Sharing]:
    """Return all options to fill one node evenly with replicas that can start. The fewest replicas come first.

    Replicas that cannot hold the whole context are listed too, with the context that they can hold.
    """
    size = inputs.cluster.node_size
    found = []
    free = replace(inputs, engine=without_layout(inputs.engine))
    for replicas in (count for count in range(1, size + 1) if size % count == 0):
        width = size // replicas
        layout = Layout(tensor_parallel_size=width, pipeline_parallel_size=1)
        memory = free.evaluate(layout).memory
        if memory is not None and memory.kv_cache_tokens >= TYPICAL_REQUEST_TOKENS:
            found.append(Sharing(replicas=replicas, layout=layout, memory=memory))
    return found


def compare_sharing(options: list[Sharing], max_model_len: int) -> str | None:
    """Say when the fewest and when the most replicas are better, with the numbers. None if there is one option."""
    if len(options) < 2:
        return None
    large, many = options[0], options[-1]
    of_large, of_many = (f"{one.replicas} x TP={one.layout.tensor_parallel_size}" for one in (large, many))
    text = (
        f"On a node {of_many} hold the weights {many.replicas} times and leave {many.total_tokens:,} tokens of cache "
        f"in all, against {large.total_tokens:,} of {of_large}. "
    )
    if many.typical_requests >= large.typical_requests:
        text += "The small engines hold no less and communicate less: they are the better choice."
    else:
        text += (
            f"The small engines communicate less and are the better choice up to {many.typical_requests:,} requests of "
            f"{TYPICAL_REQUEST_TOKENS:,} tokens at once. Beyond that {of_large} is, with larger batches."
        )
    if many.memory.kv_cache_tokens < max_model_len:
        text += f" In a small engine a request may have at most {many.memory.kv_cache_tokens:,} tokens."
    return text
