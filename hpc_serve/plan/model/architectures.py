"""The architectures that the planner knows, and how a model is built from a Hugging Face config.

A family (dense.py, moe.py, hybrid.py) describes one decoder layer. This module adds embeddings, output head, vision
tower and tables. An architecture that is not listed is an error that names it, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model import dense, hybrid, moe, vision
from hpc_serve.plan.model.config_check import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.quantization import quantization_from_config
from hpc_serve.plan.model.scheme import plain_scheme
from hpc_serve.plan.model.spec import DecoderLayer, ModelSpec
from hpc_serve.plan.model.weights import Block, Vocabulary

Family: TypeAlias = Callable[[LayerBuilder, int], DecoderLayer]

FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": dense.apertus,
    "DeciLMForCausalLM": dense.nemotron_nas,
    "DeepseekForCausalLM": moe.deepseek,
    "DeepseekV2ForCausalLM": moe.deepseek,
    "DeepseekV3ForCausalLM": moe.deepseek,
    "Exaone4ForCausalLM": dense.exaone4,
    "FalconForCausalLM": dense.falcon,
    "GemmaForCausalLM": dense.llama,
    "Gemma2ForCausalLM": dense.gemma2,
    "Gemma3ForCausalLM": dense.gemma3,
    "Gemma3ForConditionalGeneration": dense.gemma3,
    "Glm4ForCausalLM": dense.glm4,
    "Glm4MoeForCausalLM": moe.glm4_moe,
    "GptOssForCausalLM": moe.gpt_oss,
    "GraniteForCausalLM": dense.llama,
    "Llama4ForConditionalGeneration": moe.llama4,
    "LlamaForCausalLM": dense.llama,
    "MiniMaxM2ForCausalLM": moe.minimax_m2,
    "Mistral3ForConditionalGeneration": dense.llama,
    "MistralForCausalLM": dense.llama,
    "MixtralForCausalLM": moe.mixtral,
    "NemotronHForCausalLM": hybrid.nemotron_h,
    "Olmo2ForCausalLM": dense.olmo2,
    "Olmo3ForCausalLM": dense.olmo2,
    "OlmoeForCausalLM": moe.olmoe,
    "Phi3ForCausalLM": dense.llama,
    "Qwen2ForCausalLM": dense.qwen2,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen2_5_VLForConditionalGeneration": dense.qwen2,
    "Qwen3ForCausalLM": dense.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
    "Qwen3NextForCausalLM": hybrid.qwen3_next,
    "Qwen3VLForConditionalGeneration": dense.qwen3,
    "Qwen3VLMoeForConditionalGeneration": moe.qwen3_moe,
    "Qwen3_5ForCausalLM": hybrid.qwen3_5,
    "Qwen3_5ForConditionalGeneration": hybrid.qwen3_5,
    "Qwen3_5MoeForCausalLM": hybrid.qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": hybrid.qwen3_5,
}

_TOWERS: dict[str, vision.Tower] = {
    "Gemma3ForConditionalGeneration": vision.siglip,
    "Llama4ForConditionalGeneration": vision.llama4_vision,
    "Mistral3ForConditionalGeneration": vision.pixtral,
    "Qwen2_5_VLForConditionalGeneration": vision.qwen2_5_vision,
    "Qwen3VLForConditionalGeneration": vision.qwen3_vision,
    "Qwen3VLMoeForConditionalGeneration": vision.qwen3_vision,
    "Qwen3_5ForConditionalGeneration": vision.qwen3_vision,
    "Qwen3_5MoeForConditionalGeneration": vision.qwen3_vision,
}

_TIED_UNLESS_SAID = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Architectures whose transformers config ties the output head to the embedding by default."""

_ENDS = frozenset({"embedding", "final", "head"})
_ON_EVERY_STAGE: dict[str, frozenset[str]] = {
    "FalconForCausalLM": _ENDS,
    "GemmaForCausalLM": frozenset({"embedding", "final"}),
    "Gemma2ForCausalLM": frozenset({"embedding", "final"}),
    "Gemma3ForCausalLM": frozenset({"embedding", "final"}),
    "Gemma3ForConditionalGeneration": frozenset({"embedding", "final"}),
    "GptOssForCausalLM": _ENDS,
    "MixtralForCausalLM": _ENDS,
    "NemotronHForCausalLM": _ENDS,
    "OlmoeForCausalLM": _ENDS,
    "Qwen2MoeForCausalLM": _ENDS,
    "Qwen3MoeForCausalLM": _ENDS,
    "Qwen3NextForCausalLM": frozenset({"embedding", "head"}),
    "Qwen3VLMoeForConditionalGeneration": _ENDS,
    "Qwen3_5ForCausalLM": frozenset({"embedding"}),
    "Qwen3_5ForConditionalGeneration": frozenset({"embedding"}),
    "Qwen3_5MoeForCausalLM": frozenset({"embedding"}),
    "Qwen3_5MoeForConditionalGeneration": frozenset({"embedding"}),
}
"""What vLLM 0.32 builds on each pipeline stage, even on stages that do not use it, by the model's file in vLLM."""

_DEFAULT_HEADS = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}}


def model_from_config(
    config: Mapping[str, Any], *, name: str, dtype: str = "auto", quantization: str | None = None
) -> ModelSpec:
    """The model of a Hugging Face config.

    `dtype` and `quantization` are vLLM's options of those names. None: as the checkpoint is. Raises InvalidRequestError
    for an architecture or a quantization that the planner does not know.
    """
    config = CheckedConfig(config)
    architecture = str((config.get("architectures") or ["(none named)"])[0])
    family = FAMILIES.get(architecture)
    if family is None:
        raise InvalidRequestError(
            f"{name} is of architecture {architecture}, which this planner does not know, and it does not guess. "
            f"It knows {', '.join(sorted(FAMILIES))}."
        )
    text = _text_config(config)
    chosen = _dtype(config, text, dtype)
    plain = plain_scheme(chosen)
    declared = config.get("quantization_config") or text.get("quantization_config")
    scheme = quantization_from_config(declared, plain=plain, override=quantization)
    builder = LayerBuilder(text, scheme, chosen)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is None:
        tied = architecture in _TIED_UNLESS_SAID
    rows, width = builder.vocab_size, builder.hidden_size
    tower, images = Block(), None
    if architecture in _TOWERS and config.get("vision_config"):
        tower, images = _TOWERS[architecture](config["vision_config"], builder.hidden_size)
    final = builder.norms("norm", "norm.bias") if architecture == "FalconForCausalLM" else builder.norms("norm")
    return ModelSpec(
        name=name,
        architecture=architecture,
        dtype=chosen,
        dtype_asked=dtype not in ("auto", ""),
        hidden_size=builder.hidden_size,
        vocab_size=builder.vocab_size,
        num_attention_heads=builder.heads,
        num_key_value_heads=builder.kv_heads,
        max_model_len=_max_model_len(builder),
        quantization=scheme,
        embedding=Vocabulary(name="embed_tokens", rows=rows, width=width, scheme=plain),
        layers=_layers(builder, family),
        final=block(final),
        head=None if tied else Vocabulary(name="lm_head", rows=rows, width=width, scheme=scheme.head),
        everywhere=tower,
        on_every_stage=_ON_EVERY_STAGE.get(architecture, frozenset()),
        intermediate_size=builder.intermediate_size,
        rotary_bytes=_rotary_bytes(builder),
        num_experts=builder.get("num_experts", builder.get("n_routed_experts", builder.get("num_local_experts", 0))),
        num_experts_per_tok=builder.get("num_experts_per_tok", builder.get("experts_per_token", 0)),
        moe_intermediate_size=builder.get("moe_intermediate_size", builder.intermediate_size),
        images=images,
    )


def _layers(builder: LayerBuilder, family: Family) -> tuple[DecoderLayer, ...]:
    """All layers. Equal layers are one object, so that everything is computed once for them."""
    for key in ("layer_types", "block_configs", "hybrid_override_pattern"):
        named = builder.get(key)
        if named is not None and len(named) < builder.num_layers:
            raise InvalidRequestError(f"The config's {key} names {len(named)} of its {builder.num_layers} layers.")
    known: dict[DecoderLayer, DecoderLayer] = {}
    layers = (family(builder, index) for index in range(builder.num_layers))
    return tuple(known.setdefault(layer, layer) for layer in layers)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that describes the decoder. Multimodal configs omit some defaults of transformers."""
    text = config.get("text_config") or config
    return {**_DEFAULT_HEADS.get(str(text.get("model_type")), {}), **text}


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], asked: str) -> str:
    """The type that weights are loaded in: what is asked for, else the checkpoint's. vLLM loads float32 as bfloat16."""
    declared = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype")
    if asked not in ("auto", ""):
        return {"half": "float16", "float": "float32"}.get(asked, asked)
    name = str(declared or "bfloat16").removeprefix("torch.")
    return "bfloat16" if name == "float32" else name


def _max_model_len(builder: LayerBuilder) -> int:
    """The longest context the config allows: `_get_and_verify_max_len` in vLLM's config/model.py."""
    length = int(builder.get("max_position_embeddings", builder.get("model_max_length", 2048)))
    scaling = builder.get("rope_scaling", builder.get("rope_parameters", {}))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default", "llama3", "mrope", "longrope", "su"):
        return length
    factor = float(scaling.get("factor", 1.0))
    if kind == "yarn":
        return int(scaling.get("original_max_position_embeddings", length) * factor)
    return length if "gemma3" in str(builder.get("model_type")) else int(length * factor)


def _rotary_bytes(builder: LayerBuilder) -> int:
    """Bytes of the table of sines and cosines: `_compute_cos_sin_cache` in vLLM's rotary_embedding/base.py."""
    if builder.get("hybrid_override_pattern"):
        return 0
    scaling = builder.get("rope_parameters", {})
    share = builder.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    width: int = builder.get("qk_rope_head_dim", builder.get("rotary_dim", int(builder.head_dim * share)))
    return _max_model_len(builder) * width * builder.dtype_bytes
