"""How pipeline stages share the layers, and what weights a rank of each holds.

`weight_bytes` are the checkpoint's; `loading_bytes` is what vLLM adds when it loads them, and counts in "Model loading
took": rotary tables, matrices derived from weights, and what the allocator rounds up.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.model.spec import DecoderLayer, ModelSpec
from hpc_serve.plan.model.weights import Block, Vocabulary, round_up
from hpc_serve.sizes import MIB


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """One pipeline stage: its layers `first_layer` to `end_layer` - 1, and bytes on each of its ranks."""

    rank: int
    first_layer: int
    end_layer: int
    layers: tuple[DecoderLayer, ...]
    is_last: bool
    weight_bytes: int
    loading_bytes: int


def pipeline_layers(num_hidden_layers: int, pipeline_parallel_size: int) -> list[int]:
    """Layers of each stage, as vLLM deals them (`get_pp_indices` in distributed/utils.py).

    What is left over goes to the last stages but one, never to the last.

    >>> pipeline_layers(61, 4)
    [15, 15, 16, 15]
    """
    layers = [num_hidden_layers // pipeline_parallel_size] * pipeline_parallel_size
    for index in range(2, num_hidden_layers % pipeline_parallel_size + 2):
        layers[-index] += 1
    return layers


def check_layout(model: ModelSpec, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise DoesNotFitError for sizes that vLLM refuses whatever the memory, in its own words where it has any.

    Source: `verify_with_parallel_config` in vLLM's config/model.py.
    """
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    if heads % tensor_parallel_size:
        possible = ", ".join(str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0)
        raise DoesNotFitError(
            f"vLLM refuses it: Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({tensor_parallel_size}); {possible} are possible"
        )
    if pipeline_parallel_size > layers:
        raise DoesNotFitError(f"{pipeline_parallel_size} stages cannot share {layers} layers")


def pipeline_stages(
    model: ModelSpec, tensor_parallel_size: int, pipeline_parallel_size: int, *, expert_parallel: bool = False
) -> tuple[PipelineStage, ...]:
    """All stages of a layout. Raises DoesNotFitError, naming what cannot be divided, where vLLM refuses it."""
    check_layout(model, tensor_parallel_size, pipeline_parallel_size)
    sizer = _Sizer(tensor_parallel_size, tensor_parallel_size if expert_parallel else 1)
    found, start = [], 0
    for rank, count in enumerate(pipeline_layers(model.num_hidden_layers, pipeline_parallel_size)):
        layers = model.layers[start : start + count]
        is_last = rank == pipeline_parallel_size - 1
        ends = _ends(model, is_first=rank == 0, is_last=is_last)
        parts = [*(sizer.size_of(layer.block) for layer in layers), *(sizer.size_of(end) for end in ends)]
        derived = sum(sum(sizer.size_of(layer.derived)) for layer in layers)
        found.append(
            PipelineStage(
                rank=rank,
                first_layer=start,
                end_layer=start + count,
                layers=layers,
                is_last=is_last,
                weight_bytes=sum(size for size, _ in parts),
                loading_bytes=sum(rounding for _, rounding in parts) + derived + model.rotary_bytes,
            )
        )
        start += count
    return tuple(found)


def _ends(model: ModelSpec, *, is_first: bool, is_last: bool) -> list[Block | Vocabulary]:
    """Embedding, final norm and head, as far as this stage holds them, and what all stages hold."""
    everywhere = model.on_every_stage
    ends: list[Block | Vocabulary] = [model.everywhere]
    if is_first or "embedding" in everywhere or (is_last and model.head is None):
        ends.append(model.embedding)
    if is_last or "final" in everywhere:
        ends.append(model.final)
    if model.head is not None and (is_last or "head" in everywhere):
        ends.append(model.head)
    return ends


class _Sizer:
    """Sizes of blocks on one rank, each computed once: equal layers are one object."""

    def __init__(self, ranks: int, expert_ranks: int) -> None:
        self.ranks = ranks
        self.expert_ranks = expert_ranks
        self.known: dict[int, tuple[int, int]] = {}

    def size_of(self, block: Block | Vocabulary) -> tuple[int, int]:
        """(bytes, what the allocator rounds up)."""
        if id(block) not in self.known:
            weights = block.weights if isinstance(block, Block) else (block,)
            sizes = [weight.bytes_per_rank(self.ranks, self.expert_ranks) for weight in weights]
            self.known[id(block)] = (sum(sizes), sum(allocator_rounding(size) for size in sizes))
        return self.known[id(block)]


def allocator_rounding(tensor_bytes: int) -> int:
    """Bytes torch's allocator takes beyond a tensor of this size.

    From 10 MiB on a tensor has a segment of its own, a multiple of 2 MiB, whose rest is split off only if it is more
    than 1 MiB (c10/cuda/CUDACachingAllocator.cpp: kMinLargeAlloc, kRoundLarge, kSmallSize).

    >>> allocator_rounding(95 * MIB) // MIB
    1
    """
    if tensor_bytes < 10 * MIB:
        return 0
    rest = round_up(tensor_bytes, 2 * MIB) - tensor_bytes
    return rest if rest <= MIB else 0
