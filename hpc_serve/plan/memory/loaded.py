"""What the GPUs load: the model as the engine's options change it, and its weights on each pipeline stage.

Options add LoRA slots and prediction layers, and leave out a vision tower. The result is a model like any other, so
that stages, cache and speed count it. choice/advice.py names the options that cannot be counted.

Of a stage, `weight_bytes` are those of the checkpoint, `layer_bytes` those of its decoder layers. `pinned_layer_bytes`
are what these layers take as pinned memory of the node. `loading_bytes` are what vLLM adds while it loads the weights,
and counts in "Model loading took": rotary tables, matrices derived from weights, LoRA slots, and what the allocator
rounds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.model.scheme import BF16, FUSED
from hpc_serve.plan.model.spec import (
    Block,
    DecoderLayer,
    Linear,
    ModelSpec,
    Part,
    Vector,
    Vocabulary,
    Weight,
    distinct_layers,
)
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


def check_layout(model: ModelSpec, engine: EngineConfig, tensor: int, pipeline: int) -> None:
    """Raise DoesNotFitError for sizes that vLLM refuses whatever the memory, in vLLM's own words.

    Source: `verify_with_parallel_config` in vLLM's config/model.py.
    """
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    if heads % tensor:
        possible = ", ".join(str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0)
        raise DoesNotFitError(
            f"vLLM refuses it: Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({tensor}); {possible} are possible"
        )
    if pipeline > 1 and model.is_one_stage:
        raise DoesNotFitError(
            f"vLLM refuses it: Pipeline parallelism is not supported for this model ({model.architecture})"
        )
    if pipeline > layers:
        raise DoesNotFitError(f"{pipeline} stages cannot share {layers} layers")
    if (ranks := engine.decode_context_parallel_size or 1) > 1:
        _check_decode_context(model, tensor, ranks)


def _check_decode_context(model: ModelSpec, tensor: int, ranks: int) -> None:
    """Raise DoesNotFitError for a --decode-context-parallel-size that vLLM refuses: the same source.

    Its ranks are those of tensor parallelism that would hold the same part of the cache.
    """
    if any(layer.cache and (layer.cache.kind not in ("full", "mla") or layer.cache.state) for layer in model.layers):
        raise DoesNotFitError(
            "vLLM refuses it: --decode-context-parallel-size divides the cache of full attention alone, and "
            f"{model.name} has layers with windows, states or a compressed cache"
        )
    copies = tensor if model.is_mla else max(1, tensor // model.num_key_value_heads)
    if copies < ranks or tensor % ranks:
        raise DoesNotFitError(
            f"vLLM refuses it: TP={tensor} holds each part of the cache {copies} times, and "
            f"--decode-context-parallel-size {ranks} is more, or does not divide TP"
        )
    queries = model.num_attention_heads // model.num_key_value_heads
    if not model.is_mla and queries % ranks:
        raise DoesNotFitError(
            f"vLLM refuses it: --decode-context-parallel-size {ranks} does not divide the {queries} query heads of "
            "each KV head"
        )


def pipeline_stages(
    model: ModelSpec, tensor: int, pipeline: int, data: int = 1, *, expert_parallel: bool = False
) -> tuple[PipelineStage, ...]:
    """Return all stages of a layout with these sizes of tensor, pipeline and data parallelism.

    Data-parallel ranks each have all weights but the experts, which they and their tensor-parallel ranks divide: as
    whole experts with expert parallelism, else as parts of each expert (`FusedMoEParallelConfig.make` in vLLM's
    layers/fused_moe/config.py). If both sizes are above 1 with expert parallelism, each rank of some models has whole
    shared experts, for a part of the tokens (`use_sequence_parallel_moe` in config/parallel.py). In pinned memory each
    tensor is rounded up to a power of two. Raises DoesNotFitError, which names what cannot be divided, where vLLM
    refuses it.
    """
    all_ranks = tensor * data
    expert_ranks = all_ranks if expert_parallel else 1
    is_mixed = expert_parallel and tensor > 1 and data > 1
    whole = _SHARED_EXPERT if is_mixed and model.has_whole_shared_experts else None

    def sizes(block: Block | Vocabulary) -> list[int]:
        """Return the bytes of each weight on a rank."""
        found = []
        for weight in block.weights if isinstance(block, Block) else (block,):
            is_expert = isinstance(weight, Linear) and weight.is_expert
            ranks = all_ranks if is_expert else 1 if whole and whole in weight.name else tensor
            found.append(weight.bytes_per_rank(ranks, expert_ranks))
        return found

    def layer_sizes(layer: DecoderLayer) -> tuple[int, int, int]:
        """Return (bytes of a layer's weights, further bytes while loading, bytes of the weights in pinned memory)."""
        own, derived = sizes(layer.block), sizes(layer.derived)
        pinned = sum(1 << (size - 1).bit_length() for size in own if size)
        return sum(own), sum(derived) + sum(map(allocator_rounding, (*own, *derived))), pinned

    known = {id(layer): layer_sizes(layer) for layer, _ in distinct_layers(model.layers)}
    found, start = [], 0
    counts = pipeline_layers(model.num_hidden_layers - model.draft_layers, pipeline)
    counts[-1] += model.draft_layers
    for rank, count in enumerate(counts):
        layers = model.layers[start : start + count]
        is_last = rank == pipeline - 1
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
    rest = -tensor_bytes % (2 * MIB)
    return rest if rest <= MIB else 0


_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_READS = {"Qwen3ASR": ("audio",), "Whisper": ("audio",), "Qwen": ("image", "video"), "Gemma3n": ("image", "audio")}
"""What towers read that do not read images alone, by the beginning of the architecture's name."""
_PREDICTS_ONE = ("Qwen3Next", "Qwen3_5", "Step3p")
"""Architectures with one prediction layer where the config has no number: vLLM's models/*_mtp.py, speculative.py."""
_ADAPTS_VOCABULARY = (
    *("Llama", "Mistral", "Mixtral", "Ministral", "Phi3For", "PhiMoE", "Qwen3For", "Qwen3Moe", "Qwen3_5", "Granite"),
    *("Nemotron", "Cohere", "Exaone", "FalconH1", "Jamba", "Lfm2", "MiniCPM", "Solar", "Ernie4_5For", "DeciLM"),
)
"""Architectures that take adapters of embedding and head begin so: `embedding_modules` in vLLM's model files."""


def loaded_model(model: ModelSpec, engine: EngineConfig, draft: ModelSpec | None = None) -> ModelSpec:
    """Return the model with what these options load or leave out. Raises InvalidRequestError where the model lacks it.

    `draft` is the draft model that --speculative-config names, where its config was found.
    """
    if (engine.data_parallel_size or 1) > 1 and not model.num_experts:
        raise InvalidRequestError(
            f"{model.name} has no experts to share, so data parallelism is replicas: leave out --data-parallel-size "
            f"{engine.data_parallel_size}, and ask for --replicas, which start, stop and fail one by one."
        )
    if model.images and is_text_only(model, engine):
        model = replace(model, tower=Block(), images=None)
    elif model.images and is_left_out("video", engine):
        model = replace(model, images=replace(model.images, frame_pairs=0, kept_tokens_0_11=0))
    if engine.is_pooling:
        model = replace(model, head=None)
    if engine.mamba_ssm_cache_dtype != "auto":
        model = _with_state_type(model, _STATE_BYTES[engine.mamba_ssm_cache_dtype])
    if engine.enable_eplb or engine.redundant_experts:
        model = _with_redundant_experts(model, engine)
    if engine.speculates_with_own_layers:
        model = _with_prediction_layers(model)
    if draft is not None:
        model = _with_draft(model, draft)
    return _with_lora_slots(model, engine) if engine.enable_lora else model


def is_text_only(model: ModelSpec, engine: EngineConfig) -> bool:
    """Return whether vLLM leaves the tower out: `_mark_tower_model` in its model_executor/models/interfaces.py.

    It does so where the limit of each kind of input that the tower reads is 0, as with --language-model-only.
    """
    return engine.language_model_only or all(is_left_out(kind, engine) for kind in kinds_read(model))


def kinds_read(model: ModelSpec) -> tuple[str, ...]:
    """Return the kinds of input that the model's tower reads, in vLLM's words."""
    return next((kinds for names, kinds in _READS.items() if model.architecture.startswith(names)), ("image",))


def is_left_out(kind: str, engine: EngineConfig) -> bool:
    """Return whether the limit of a kind of input, which is a number or {"count": …} with sizes, is 0."""
    limit = (engine.limit_mm_per_prompt or {}).get(kind)
    return (limit.get("count") if isinstance(limit, dict) else limit) == 0


def _with_state_type(model: ModelSpec, element_bytes: int) -> ModelSpec:
    """Return the model with recurrent states of this type.

    The first tensor of a state is the convolution's, and stays.
    """

    def changed(layer: DecoderLayer) -> DecoderLayer:
        if layer.cache is None:
            return layer
        state = layer.cache.state[:1] + tuple((elements, element_bytes) for elements, _ in layer.cache.state[1:])
        return replace(layer, cache=replace(layer.cache, state=state))

    return model.with_layers(changed)


def _with_redundant_experts(model: ModelSpec, engine: EngineConfig) -> ModelSpec:
    """Return the model with further copies of experts in each layer, and a buffer of one layer's experts.

    Raises InvalidRequestError for what vLLM refuses: `ParallelConfig` in config/parallel.py. The buffer is
    `expert_buffer` in distributed/eplb/eplb_state.py.
    """
    if not engine.enable_eplb:
        raise InvalidRequestError("vLLM refuses redundant experts (--eplb-config) without --enable-eplb: add it.")
    if not engine.enable_expert_parallel:
        raise InvalidRequestError("vLLM refuses --enable-eplb without --enable-expert-parallel: add it.")
    if not model.num_experts:
        raise InvalidRequestError(f"{model.name} has no experts: leave out --enable-eplb.")
    more = engine.redundant_experts

    def grown(weight: Weight) -> Weight:
        if isinstance(weight, Linear) and weight.is_expert:
            return replace(weight, copies=weight.copies + more)
        return weight

    model = model.with_weights(lambda weights: tuple(map(grown, weights)))
    layers = list(model.layers)
    last = max(index for index, layer in enumerate(layers) if layer.block.experts)
    layers[last] = _with_derived(layers[last], layers[last].block.experts)
    return replace(model, layers=tuple(layers))


def _with_derived(layer: DecoderLayer, more: Iterable[Weight]) -> DecoderLayer:
    return replace(layer, derived=Block(weights=(*layer.derived.weights, *more)))


def _with_prediction_layers(model: ModelSpec) -> ModelSpec:
    """Return the model with its layers for multi-token prediction on the last pipeline stage. Each has its own cache.

    A layer is like the last one, with a projection of two inputs and three norms (vLLM's deepseek_mtp.py). It shares
    embedding and head with the model (`_maybe_share_embeddings` and `_maybe_share_lm_head` in v1/spec_decode).
    """
    count = model.prediction_layers or (1 if model.architecture.startswith(_PREDICTS_ONE) else 0)
    if not count:
        raise InvalidRequestError(
            f"--speculative-config asks for the model's own prediction layers (mtp), and the config of {model.name} "
            "has none: name a draft model, or leave it out."
        )
    last, hidden = model.layers[-1], model.hidden_size
    ends: tuple[Weight, ...] = (
        Linear(name="eh_proj", inputs=Part(2 * hidden), outputs=(Part(hidden),)),
        Vector(name="mtp.norms", size=3 * hidden, element_bytes=model.dtype_bytes),
    )
    layer = replace(last, block=Block(weights=(*last.block.weights, *ends)))
    return replace(model, layers=(*model.layers, *(layer,) * count), prediction_layers=0, draft_layers=count)


def _with_draft(model: ModelSpec, draft: ModelSpec) -> ModelSpec:
    """Return the model with the layers of a draft model on its last stage, with their caches, embedding, norm and head.

    Every rank of the model's tensor parallelism has its share (`draft_tensor_parallel_size` in vLLM's
    config/speculative.py).
    """
    has_own_words = draft.embedding.rows > 0
    if has_own_words and draft.vocab_size != model.vocab_size:
        raise InvalidRequestError(
            f"--speculative-config: the draft model {draft.name} has a vocabulary of {draft.vocab_size:,}, and "
            f"{model.name} one of {model.vocab_size:,}. vLLM refuses it: they must be the same."
        )
    if not has_own_words and draft.hidden_size != model.hidden_size:
        raise InvalidRequestError(
            f"--speculative-config: the head {draft.name} is for hidden states of {draft.hidden_size:,}, and "
            f"{model.name} has {model.hidden_size:,}."
        )
    ends: tuple[Weight, ...] = (*draft.final.weights, *((draft.head,) if draft.head else ()))
    ends += (draft.embedding,) if has_own_words else ()
    first = replace(draft.layers[0], block=Block(weights=(*draft.layers[0].block.weights, *ends)))
    layers = (first, *draft.layers[1:])
    return replace(model, layers=(*model.layers, *layers), draft_layers=model.draft_layers + len(layers))


def _with_lora_slots(model: ModelSpec, engine: EngineConfig) -> ModelSpec:
    """Return the model with the tensors that vLLM allocates for adapters beside each matrix of the decoder."""

    def with_slots(layer: DecoderLayer) -> DecoderLayer:
        return _with_derived(layer, (slot for weight in layer.block.weights for slot in _lora_slots(weight, engine)))

    layers = list(model.with_layers(with_slots).layers)
    if model.architecture.startswith(_ADAPTS_VOCABULARY):
        for place, name in ((0, "embed_tokens"), (-1, "lm_head")):
            layers[place] = _with_derived(layers[place], _vocabulary_slots(name, model, engine))
    return replace(model, layers=tuple(layers))


def _vocabulary_slots(name: str, model: ModelSpec, engine: EngineConfig) -> Iterator[Linear]:
    """Yield the slots beside embedding or output head, which no rank divides.

    Sources: `create_lora_weights` in vLLM's lora/layers/vocab_parallel_embedding.py and logits_processor.py.
    """
    if _is_target(name, engine.lora_target_modules):
        for side, size in (("vocabulary", model.vocab_size), ("hidden", model.hidden_size)):
            rank = Part(engine.lora_rank * engine.lora_slots)
            yield Linear(name=f"{name}.lora_{side}", inputs=rank, outputs=(Part(size),))


def _lora_slots(weight: Weight, engine: EngineConfig) -> Iterator[Linear]:
    """Yield the matrices A and B of all slots beside one matrix, in the model's 16-bit type.

    A column-parallel matrix has a whole A for each of its fused parts and divides B. A row-parallel one divides A and
    has a whole B. Fully sharded LoRAs divide both. Sources: `create_lora_weights` in vLLM's lora/layers/base_linear.py,
    column_parallel_linear.py and fused_moe.py.
    """
    targets = engine.lora_target_modules
    if not isinstance(weight, Linear) or not _is_target(weight.name, targets, is_fused=len(weight.outputs) > 1):
        return
    rank, sharded = engine.lora_rank * engine.lora_slots, engine.fully_sharded_loras and weight.split != "none"
    a_split = "row" if weight.split == "row" else "column" if sharded else "none"
    b_split = "column" if weight.split == "column" or sharded else "none"
    plain = replace(weight, bias=False, scheme=BF16)
    a_outputs = (Part(rank * len(weight.outputs)),)
    yield replace(plain, name=f"{weight.name}.lora_a", outputs=a_outputs, split=a_split)  # type: ignore[arg-type]
    yield replace(plain, name=f"{weight.name}.lora_b", inputs=Part(rank), split=b_split)  # type: ignore[arg-type]


def _is_target(name: str, targets: tuple[str, ...] | None, *, is_fused: bool = False) -> bool:
    """Return whether --lora-target-modules names a matrix or a part of it: `is_in_target_modules` in vLLM's
    lora/utils.py."""
    if targets is None:
        return True
    suffix = name.rsplit(".", 1)[-1]
    fused, parts = FUSED[suffix] if is_fused and suffix in FUSED else (suffix, ())
    return any(target in (suffix, name, fused, *parts) for target in targets)
