"""One engine over a whole node, or several side by side: what each way of sharing the node leaves for requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.memory.estimate import MemoryEstimate

TYPICAL_REQUEST_TOKENS = 2048
"""Length by which concurrency is compared where the longest context says little."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """`replicas` engines of one layout on a node, each with `memory` on its tightest GPU."""

    replicas: int
    layout: Layout
    memory: MemoryEstimate

    @property
    def total_tokens(self) -> int:
        """Tokens of cache of all replicas together."""
        return self.replicas * self.memory.kv_cache_tokens

    @property
    def typical_requests(self) -> int:
        """Requests of TYPICAL_REQUEST_TOKENS that all replicas hold at once."""
        return self.replicas * (self.memory.kv_cache_tokens // TYPICAL_REQUEST_TOKENS)


def replica_options(inputs: PlanInputs) -> list[Sharing]:
    """Every even way to fill one node with replicas that can start at all, the widest first; a context that is too long
    for the small ones is cut to what they hold, so that they can be compared.
    """
    size = inputs.cluster.node_size
    found = []
    free = replace(inputs, engine=_without_layout(inputs.engine))
    for replicas in (count for count in range(1, size + 1) if size % count == 0):
        width = size // replicas
        layout = Layout(tensor_parallel_size=width, pipeline_parallel_size=1, num_nodes=1, gpus_per_node=width)
        memory = free.evaluate(layout).memory
        if memory is not None and memory.kv_cache_tokens >= TYPICAL_REQUEST_TOKENS:
            found.append(Sharing(replicas=replicas, layout=layout, memory=memory))
    return found


def compare_sharing(ways: list[Sharing], max_model_len: int) -> str | None:
    """When the widest and when the most replicas are the better choice, with the numbers; None: there is no choice."""
    if len(ways) < 2:
        return None
    wide, many = ways[0], ways[-1]
    width = "one" if wide.replicas == 1 else str(wide.replicas)
    text = (
        f"{many.replicas} engines of TP={many.layout.tensor_parallel_size} hold the weights {many.replicas} times and "
        f"leave {many.total_tokens:,} tokens of cache in all; {width} of TP={wide.layout.tensor_parallel_size} "
        f"{'leaves' if wide.replicas == 1 else 'leave'} {wide.total_tokens:,}. "
    )
    if many.typical_requests >= wide.typical_requests:
        text += "The small ones hold no less and spend less on communication: they win."
    else:
        text += (
            f"The small ones spend less on communication and win while {many.typical_requests:,} requests of "
            f"{TYPICAL_REQUEST_TOKENS:,} tokens at once are enough; beyond that the wide "
            f"{'one does' if wide.replicas == 1 else 'ones do'}, with larger batches."
        )
    if many.memory.kv_cache_tokens < max_model_len:
        text += f" In a small one a request may have at most {many.memory.kv_cache_tokens:,} tokens."
    return text


def _without_layout(engine: EngineConfig) -> EngineConfig:
    return replace(engine, tensor_parallel_size=None, pipeline_parallel_size=None)
