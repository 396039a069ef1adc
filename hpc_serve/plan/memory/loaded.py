"""Adds to a model, or removes from it, what the engine's options load: LoRA slots, prediction layers, a vision tower.

The result is a model like any other, so that stages, cache and speed count it. report/notes.py names the options that
cannot be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.model.scheme import BF16, FUSED
from hpc_serve.plan.model.spec import Block, DecoderLayer, Linear, ModelSpec, Part, Vector, Weight

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
    if not isinstance(weight, Linear):
        return
    if not _is_target(weight.name, engine.lora_target_modules, is_fused=len(weight.outputs) > 1):
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
