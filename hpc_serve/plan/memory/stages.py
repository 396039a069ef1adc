"""Which layers each pipeline stage has, and the bytes of weights on each of its ranks.

`weight_bytes` are those of the checkpoint, `layer_bytes` those of its decoder layers. `pinned_layer_bytes` are what
these layers take as pinned memory of the node. `loading_bytes` are what vLLM adds while it loads the weights, and
counts in "Model loading took": rotary tables, matrices derived from weights, LoRA slots, and what the allocator rounds
up.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.model.spec import Block, DecoderLayer, Linear, ModelSpec, Vocabulary, distinct_layers, round_up
from hpc_serve.units import GIB, MIB

_SHARED_EXPERT = "shared_expert"
"""The name of a weight of shared experts has this."""


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """One pipeline stage: its layers `first_layer` to `end_layer` - 1, and the bytes on each of its ranks."""

    rank: int
    first_layer: int
    end_layer: int
    layers: tuple[DecoderLayer, ...]
    is_last: bool
    weight_bytes: int
    layer_bytes: int
    pinned_layer_bytes: int
    loading_bytes: int


def pipeline_layers(num_hidden_layers: int, pipeline_parallel_size: int) -> list[int]:
    """Return the number of layers of each stage: `get_pp_indices` in vLLM's distributed/utils.py.

    Layers that are left over go to the last stages before the very last one.

    >>> pipeline_layers(61, 4)
    [15, 15, 16, 15]
    """
    layers = [num_hidden_layers // pipeline_parallel_size] * pipeline_parallel_size
    for index in range(2, num_hidden_layers % pipeline_parallel_size + 2):
        layers[-index] += 1
    return layers


def check_layout(model: ModelSpec, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Raise DoesNotFitError for sizes that vLLM refuses whatever the memory, in vLLM's own words.

    Source: `verify_with_parallel_config` in vLLM's config/model.py.
    """
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    if heads % tensor_parallel_size:
        possible = ", ".join(str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0)
        raise DoesNotFitError(
            f"vLLM refuses it: Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({tensor_parallel_size}); {possible} are possible"
        )
    if pipeline_parallel_size > 1 and model.is_one_stage:
        raise DoesNotFitError(
            f"vLLM refuses it: Pipeline parallelism is not supported for this model ({model.architecture})"
        )
    if pipeline_parallel_size > layers:
        raise DoesNotFitError(f"{pipeline_parallel_size} stages cannot share {layers} layers")


def check_decode_context(model: ModelSpec, engine: EngineConfig, tensor_parallel_size: int) -> None:
    """Raise DoesNotFitError for a --decode-context-parallel-size that vLLM refuses: the same source.

    Its ranks are those of tensor parallelism that would hold the same part of the cache.
    """
    ranks = engine.decode_context_parallel_size or 1
    if ranks == 1:
        return
    if any(layer.cache and (layer.cache.kind not in ("full", "mla") or layer.cache.state) for layer in model.layers):
        raise DoesNotFitError(
            "vLLM refuses it: --decode-context-parallel-size divides the cache of full attention alone, and "
            f"{model.name} has layers with windows, states or a compressed cache"
        )
    copies = tensor_parallel_size if model.is_mla else max(1, tensor_parallel_size // model.num_key_value_heads)
    if copies < ranks or tensor_parallel_size % ranks:
        raise DoesNotFitError(
            f"vLLM refuses it: TP={tensor_parallel_size} holds each part of the cache {copies} times, and "
            f"--decode-context-parallel-size {ranks} is more, or does not divide TP"
        )
    queries = model.num_attention_heads // model.num_key_value_heads
    if not model.is_mla and queries % ranks:
        raise DoesNotFitError(
            f"vLLM refuses it: --decode-context-parallel-size {ranks} does not divide the {queries} query heads of "
            "each KV head"
        )


def pipeline_stages(
    model: ModelSpec,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    *,
    data_parallel_size: int = 1,
    expert_parallel: bool = False,
) -> tuple[PipelineStage, ...]:
    """Return all stages of a layout.

    Data-parallel ranks each have all weights but the experts, which they and their tensor-parallel ranks divide: as
    whole experts with expert parallelism, else as parts of each expert (`FusedMoEParallelConfig.make` in vLLM's
    layers/fused_moe/config.py). If both sizes are above 1 with expert parallelism, each rank of some models has whole
    shared experts, for a part of the tokens (`use_sequence_parallel_moe` in config/parallel.py). In pinned memory each
    tensor is rounded up to a power of two. Raises DoesNotFitError, which names what cannot be divided, where vLLM
    refuses it.
    """
    check_layout(model, tensor_parallel_size, pipeline_parallel_size)
    all_ranks = tensor_parallel_size * data_parallel_size
    expert_ranks = all_ranks if expert_parallel else 1
    is_mixed = expert_parallel and tensor_parallel_size > 1 and data_parallel_size > 1
    whole = _SHARED_EXPERT if is_mixed and model.has_whole_shared_experts else None

    def sizes(block: Block | Vocabulary) -> list[int]:
        """Return the bytes of each weight on a rank."""
        found = []
        for weight in block.weights if isinstance(block, Block) else (block,):
            is_expert = isinstance(weight, Linear) and weight.is_expert
            ranks = all_ranks if is_expert else 1 if whole and whole in weight.name else tensor_parallel_size
            found.append(weight.bytes_per_rank(ranks, expert_ranks))
        return found

    def layer_sizes(layer: DecoderLayer) -> tuple[int, int, int]:
        """Return (bytes of a layer's weights, further bytes while loading, bytes of the weights in pinned memory)."""
        own, derived = sizes(layer.block), sizes(layer.derived)
        pinned = sum(1 << (size - 1).bit_length() for size in own if size)
        return sum(own), sum(derived) + sum(map(allocator_rounding, (*own, *derived))), pinned

    known = {id(layer): layer_sizes(layer) for layer, _ in distinct_layers(model.layers)}
    found, start = [], 0
    counts = pipeline_layers(model.num_hidden_layers - model.draft_layers, pipeline_parallel_size)
    counts[-1] += model.draft_layers
    for rank, count in enumerate(counts):
        layers = model.layers[start : start + count]
        is_last = rank == pipeline_parallel_size - 1
        ends = _outside_layers(model, is_first=rank == 0, is_last=is_last)
        of_layers = [known[id(layer)] for layer in layers]
        of_ends = [size for end in ends for size in sizes(end)]
        layer_bytes, layer_loading, pinned = (sum(size[part] for size in of_layers) for part in range(3))
        found.append(
            PipelineStage(
                rank=rank,
                first_layer=start,
                end_layer=start + count,
                layers=layers,
                is_last=is_last,
                weight_bytes=layer_bytes + sum(of_ends),
                layer_bytes=layer_bytes,
                pinned_layer_bytes=pinned,
                loading_bytes=layer_loading + sum(map(allocator_rounding, of_ends)) + model.rotary_bytes,
            )
        )
        start += count
    return tuple(found)


def offloaded_bytes(stage: PipelineStage, engine: EngineConfig) -> int:
    """Return the bytes of weights on a rank that stay in the node's memory: `UVAOffloader` in vLLM's
    model_executor/offloader.

    It takes weights of decoder layers until they are as many GiB as --cpu-offload-gb says.
    """
    return min(int((engine.cpu_offload_gb or 0) * GIB), stage.layer_bytes)


def pinned_bytes(stage: PipelineStage, engine: EngineConfig) -> int:
    """Return the bytes of the node's memory that `offloaded_bytes` take: vLLM pins them.

    torch rounds each pinned tensor up to a power of two (c10's CachingHostAllocator). Which tensors stay is vLLM's
    choice, so the rounding of all layers is taken.
    """
    return -(-offloaded_bytes(stage, engine) * stage.pinned_layer_bytes // max(1, stage.layer_bytes))


def _outside_layers(model: ModelSpec, *, is_first: bool, is_last: bool) -> list[Block | Vocabulary]:
    """Return a stage's blocks beside its layers: those of all stages, and its own of embedding, norm and head."""
    everywhere = model.on_every_stage
    ends: list[Block | Vocabulary] = [model.everywhere]
    if is_first or "embedding" in everywhere or (is_last and model.head is None):
        ends.append(model.embedding)
    if is_last or "final" in everywhere:
        ends.append(model.final)
    if model.head is not None and (is_last or "head" in everywhere):
        ends.append(model.head)
    return ends


def allocator_rounding(tensor_bytes: int) -> int:
    """Return the bytes that torch's allocator takes in addition to a tensor of this size.

    A tensor of 10 MiB or more has a segment of its own, a multiple of 2 MiB. Others get the rest of the segment
    only where it is more than 1 MiB (c10/cuda/CUDACachingAllocator.cpp: kMinLargeAlloc, kRoundLarge,
    kSmallSize).

    >>> allocator_rounding(95 * MIB) // MIB
    1
    """
    if tensor_bytes < 10 * MIB:
        return 0
    rest = round_up(tensor_bytes, 2 * MIB) - tensor_bytes
    return rest if rest <= MIB else 0
