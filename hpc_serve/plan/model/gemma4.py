"""Gemma 4's decoder: heads of two widths, values that are keys, layers that share a cache, layers' own embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import missing
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Part, Vocabulary, Weight

_GLOBAL_HEAD_DIM = 512
"""Width of the heads that attend to all tokens, where a config does not say: transformers' default."""


def gemma4(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Gemma 4. A layer that attends to all tokens has wider heads, and its values may be its keys.

    The last `num_kv_shared_layers` take keys and values from a layer before. Experts stand beside the MLP.
    """
    builder = builder.named("model.language_model.layers")
    attends_to_all = builder.of_layer("layer_types", is_needed=True) == "full_attention"
    is_shared = builder.index >= builder.num_layers - builder.get("num_kv_shared_layers", 0)
    equal = builder.flag("attention_k_eq_v")
    builder = _with_own_heads(builder, attends_to_all=attends_to_all, equal=equal)
    attention, copied = _gemma4_attention(builder, is_shared=is_shared)
    has_one = attends_to_all and equal and not is_shared
    wide = is_shared and builder.flag("use_double_wide_mlp")
    window = 0 if attends_to_all else builder.require("sliding_window")
    cache = None if is_shared else builder.cache(window, "sliding" if window else "full")
    return decoder_layer(
        cache,
        [*attention, *([] if has_one else copied)],
        builder.mlp("mlp", builder.intermediate_size * (2 if wide else 1)),
        _gemma4_experts(builder),
        per_layer_input(builder),
        [*builder.two_norms(), *builder.norms("pre_feedforward_layernorm", "post_feedforward_layernorm")],
        derived=copied if has_one else [],
    )


def per_layer_input(builder: LayerBuilder) -> list[Weight]:
    """Return what a layer adds its own embedding with, if the model has such embeddings."""
    width = builder.get("hidden_size_per_layer_input", 0)
    if not width:
        return []
    return [
        builder.linear("per_layer_input_gate", builder.hidden_size, [width]),
        builder.linear("per_layer_projection", width, [builder.hidden_size]),
        *builder.norms("post_per_layer_input_norm"),
    ]


def gemma4_beside(builder: LayerBuilder) -> list[Weight]:
    """Return the weights beside the layers of Gemma 4's small models: an embedding of each token for each layer."""
    width = builder.get("hidden_size_per_layer_input", 0) * builder.num_layers
    rows = builder.get("vocab_size_per_layer_input", builder.vocab_size)
    if not width:
        return []
    plain = builder.quantization.plain
    return [
        Vocabulary(name="embed_tokens_per_layer", rows=rows, width=width, scheme=plain),
        builder.linear("model.per_layer_model_projection", builder.hidden_size, [width], "column"),
        builder.vector("model.per_layer_projection_norm", width // builder.num_layers),
    ]


def _with_own_heads(builder: LayerBuilder, *, attends_to_all: bool, equal: bool) -> LayerBuilder:
    """Return the builder with the layer's heads, by the fields for full attention or transformers' for each layer."""
    each = builder.get("per_layer_config", {})
    if not isinstance(each, Mapping) or not all(isinstance(one, Mapping) for one in each.values()):
        raise InvalidRequestError("The config's per_layer_config must be an object of objects.")
    of: Mapping[str, int] = next(
        (one for key, one in each.items() if str(key).lstrip("0") == (str(builder.index).lstrip("0"))), {}
    )
    if not attends_to_all:
        width, kv_heads = builder.head_dim, builder.kv_heads
    else:
        width = builder.get("global_head_dim", of.get("head_dim", _GLOBAL_HEAD_DIM))
        kv_heads = builder.get("num_global_key_value_heads", of.get("num_key_value_heads"))
        kv_heads = kv_heads if equal and kv_heads else builder.kv_heads
    unknown = sorted(set(of) - {"head_dim", "num_key_value_heads"})
    if unknown or not all(type(value) is int and value > 0 for value in of.values()):
        raise InvalidRequestError(
            f"The config's per_layer_config has sizes of layer {builder.index} that are not known."
        )
    return builder.with_heads(head_dim=width, value_dim=width, kv_heads=kv_heads)


def _gemma4_attention(builder: LayerBuilder, *, is_shared: bool) -> tuple[list[Weight], list[Weight]]:
    """Return (weights of a layer's attention, the values' projection).

    vLLM holds the values' projection even if the values are the keys.
    """
    bias, hidden = builder.flag("attention_bias"), builder.hidden_size
    query, norm = Part(builder.heads, builder.head_dim), builder.vector("self_attn.q_norm", builder.head_dim)
    output = builder.linear("self_attn.o_proj", query, [hidden], "row", bias=bias)
    if is_shared:
        return [builder.linear("self_attn.q_proj", hidden, [query], "column", bias=bias), output, norm], []
    kv = Part(builder.kv_heads, builder.head_dim, replicate=True)
    fused = builder.linear("self_attn.q_proj", hidden, [query, kv], "column", bias=bias)
    values = builder.linear("self_attn.v_proj", hidden, [kv], "column", bias=bias)
    return [fused, output, norm, builder.vector("self_attn.k_norm", builder.head_dim)], [values]


def _gemma4_experts(builder: LayerBuilder) -> list[Weight]:
    count = builder.get("num_experts", 0)
    if not builder.get("enable_moe_block", bool(count)) or not count:
        return []
    size = builder.first("moe_intermediate_size", "expert_intermediate_size")
    if size is None:
        raise missing("moe_intermediate_size")
    return [
        *builder.router("router", count),
        builder.vector("router.per_expert_scale", count),
        *builder.experts("experts", count, size),
        *builder.norms("router.scale", "pre_feedforward_layernorm_2"),
        *builder.norms("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    ]
