"""Dense decoders: one function for one layer of each family.

Families differ in biases, in norms, in whether the MLP has a gate, and in which layers have a sliding window.
"""

from __future__ import annotations

from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def window_cache(builder: LayerBuilder, index: int, *, pattern: int = 0) -> LayerCache:
    """The cache of a layer that may have a sliding window.

    Where the config has `layer_types`, they decide. Otherwise every `pattern`-th layer attends to all tokens and the
    others have the window. With `pattern` 0 all layers have the window.
    """
    window = builder.get("sliding_window", 0)
    if not window or builder.get("use_sliding_window") is False:
        return builder.cache()
    kinds = builder.get("layer_types")
    slides = "sliding" in kinds[index] if kinds else not pattern or (index + 1) % pattern != 0
    return builder.cache(window, "sliding") if slides else builder.cache()


def llama(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Llama 2 and 3, Mistral, Phi-3 and 4, Granite, Gemma 1."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", builder.get("bias", False)))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bool(builder.get("mlp_bias", False))),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def exaone4(builder: LayerBuilder, index: int) -> DecoderLayer:
    """EXAONE 4: norms over queries and keys, and after each half of the layer."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", builder.get("bias", False)))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.query_key_norms(f"{prefix}.self_attn"),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bool(builder.get("mlp_bias", False))),
        builder.norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def qwen2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Qwen 2 and 2.5: biases on q, k and v only."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=True),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def qwen3(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Qwen 3, dense: norms over queries and keys."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.query_key_norms(f"{prefix}.self_attn"),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def glm4(builder: LayerBuilder, index: int) -> DecoderLayer:
    """GLM-4, dense: four norms, biases on q, k and v."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_TWO_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def gemma2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Gemma 2: four norms. Every second layer attends to all tokens."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_FOUR_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=2))


def gemma3(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Gemma 3: as Gemma 2, with norms over queries and keys. Every sixth layer attends to all tokens."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.query_key_norms(f"{prefix}.self_attn"),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_FOUR_NORMS),
    )
    pattern = int(builder.get("sliding_window_pattern", 6))
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=pattern))


def olmo2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """OLMo 2 and 3: norms over all queries and over all keys together, and after each half of the layer."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias),
        [
            builder.vector(f"{prefix}.self_attn.q_norm", builder.heads * builder.head_dim),
            builder.vector(f"{prefix}.self_attn.k_norm", builder.kv_heads * builder.head_dim),
        ],
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=4))


def apertus(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Apertus: no gate in the MLP, two learned numbers in its activation, norms over queries and keys."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.query_key_norms(f"{prefix}.self_attn") if builder.get("qk_norm", True) else [],
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, gated=False),
        [builder.vector(f"{prefix}.mlp.act_fn", 2)],
        builder.norms("attention_layernorm", "feedforward_layernorm"),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def falcon(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Falcon with its new decoder: attention and MLP in parallel, each after a norm with bias, and no gate."""
    prefix = f"transformer.h.{index}"
    bias = bool(builder.get("bias", False))
    size = builder.intermediate_size or 4 * builder.hidden_size
    weights = block(
        builder.attention(f"{prefix}.self_attention", bias=bias, output_bias=bias),
        builder.mlp(f"{prefix}.mlp", size, bias=bias, gated=False),
        builder.norms("ln_attn", "ln_attn.bias", "ln_mlp", "ln_mlp.bias"),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def nemotron_nas(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Nemotron from architecture search: each layer has its own KV heads and MLP size, or lacks one of the two."""
    prefix = f"model.layers.{index}"
    config = builder.require("block_configs")[index]
    attention, feed_forward = config.get("attention", {}), config.get("ffn", {})
    weights, cache = [], None
    if not attention.get("no_op") and not attention.get("replace_with_linear"):
        kv_heads = builder.heads // attention["n_heads_in_group"]
        bias = bool(builder.get("attention_bias", False))
        weights += builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias, kv_heads=kv_heads)
        weights += builder.norms("input_layernorm")
        cache = LayerCache(kind="full", kv_heads=kv_heads, head_dim=builder.head_dim, value_dim=builder.head_dim)
    if not feed_forward.get("no_op") and not feed_forward.get("replace_with_linear"):
        exact = int(2 * feed_forward["ffn_mult"] * builder.hidden_size / 3)
        weights += builder.mlp(f"{prefix}.mlp", -(-exact // 256) * 256)
        weights += builder.norms("post_attention_layernorm")
    return DecoderLayer(block=block(weights), cache=cache)
