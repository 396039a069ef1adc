"""Dense decoders: one function for one layer of each family.

Families differ in biases, in norms, in whether the MLP has a gate, and in which layers have a sliding window.
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config_check import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_KINDS = ("full_attention", "sliding_attention")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def window_cache(builder: LayerBuilder, index: int, *, pattern: int = 0) -> LayerCache:
    """The cache of a layer that may have a sliding window.

    Where the config has `layer_types`, they decide, and after them `max_window_layers`, the first layer with the
    window. Otherwise every `pattern`-th layer attends to all tokens and the others have the window. With `pattern` 0
    all layers have the window.
    """
    window, kinds, first = (
        builder.get("sliding_window", 0),
        builder.get("layer_types"),
        builder.get("max_window_layers"),
    )
    if kinds and kinds[index] not in _KINDS:
        kind = str(kinds[index])[:40]
        raise InvalidRequestError(f"The config's layer_types has {kind!r}: use {' or '.join(_KINDS)}.")
    if not window or builder.get("use_sliding_window") is False:
        return builder.cache()
    if kinds:
        slides = kinds[index] == "sliding_attention"
    elif first is not None:
        slides = index >= first
    else:
        slides = not pattern or (index + 1) % pattern != 0
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


def seed_oss(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Seed-OSS: biases of its own for q, k and v, and for the output projection."""
    prefix = f"model.layers.{index}"
    bias, output = bool(builder.get("attention_bias", True)), bool(builder.get("attention_out_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=output),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bool(builder.get("mlp_bias", False))),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def glm(builder: LayerBuilder, index: int) -> DecoderLayer:
    """GLM-4-9B: biases on q, k and v."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", True))),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def muse_glimmer(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Muse Glimmer: four norms, a gate of the heads' width on the attention's output, windows."""
    prefix = f"model.layers.{index}"
    heads = Part(builder.heads, builder.head_dim)
    weights = block(
        builder.attention(f"{prefix}.self_attn"),
        [builder.linear(f"{prefix}.self_attn.gate_proj", builder.hidden_size, [heads], "column")],
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size),
        builder.norms(*_FOUR_NORMS),
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
    pattern = builder.get("sliding_window_pattern", 4)
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=_pattern_length(pattern)))


def _pattern_length(pattern: int | str) -> int:
    """The layers of one turn of a pattern, which is a number, or a letter for each layer ("LLLG")."""
    return len(pattern) if isinstance(pattern, str) else pattern


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


def glm4v(builder: LayerBuilder, index: int) -> DecoderLayer:
    """The decoder of GLM-4.1V: GLM-4's, with biases on q, k and v where the config says nothing."""
    return glm4(builder, index, bias=True)


def glm4(builder: LayerBuilder, index: int, *, bias: bool = False) -> DecoderLayer:
    """GLM-4, dense: four norms, biases on q, k and v."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", bias))),
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
    pattern = _pattern_length(builder.get("sliding_window_pattern", 6))
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
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.query_key_norms(f"{prefix}.self_attn") if builder.get("qk_norm", True) else [],
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, gated=False),
        [builder.vector(f"{prefix}.mlp.act_fn", 2)],
        builder.norms("attention_layernorm", "feedforward_layernorm"),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def falcon(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Falcon: no gate, and attention and MLP in parallel after one norm with bias, or each after its own."""
    prefix = f"transformer.h.{index}"
    bias = bool(builder.get("bias", False))
    size = builder.intermediate_size or 4 * builder.hidden_size
    own_norms = 2 if builder.get("new_decoder_architecture", False) else 1
    if builder.get("parallel_attn", True):
        norms = ("ln_attn", "ln_mlp")[: builder.get("num_ln_in_parallel_attn", own_norms)]
    else:
        norms = _TWO_NORMS
    weights = block(
        builder.attention(f"{prefix}.self_attention", bias=bias, output_bias=bias),
        builder.mlp(f"{prefix}.mlp", size, bias=bias, gated=False),
        builder.norms(*norms, *(f"{norm}.bias" for norm in norms)),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def falcon_fields(config: CheckedConfig) -> None:
    """Write Falcon's KV heads where all families have them. Only its new decoder reads `num_kv_heads`."""
    if not config.get("new_decoder_architecture", False):
        config.ignore("num_kv_heads")
        config["num_key_value_heads"] = 1 if config.get("multi_query", True) else config["num_attention_heads"]
    else:
        config.get("multi_query")


def nemotron_nas(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Nemotron from architecture search: each layer has its own KV heads and MLP size, or lacks one of the two."""
    prefix = f"model.layers.{index}"
    config = builder.require("block_configs")[index]
    attention = config.get("attention", CheckedConfig({}, path=f"{config.path}attention."))
    feed_forward = config.get("ffn", CheckedConfig({}, path=f"{config.path}ffn."))
    weights, cache = [], None
    if not attention.get("no_op") and not attention.get("replace_with_linear"):
        sizes = builder.head_sizes(kv_heads=builder.heads // attention["n_heads_in_group"])
        bias = bool(builder.get("attention_bias", False))
        weights += builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias, sizes=sizes)
        weights += builder.norms("input_layernorm")
        cache = builder.cache(sizes=sizes)
    if not feed_forward.get("no_op") and not feed_forward.get("replace_with_linear"):
        exact = int(2 * feed_forward["ffn_mult"] * builder.hidden_size / 3)
        weights += builder.mlp(f"{prefix}.mlp", -(-exact // 256) * 256)
        weights += builder.norms("post_attention_layernorm")
    return DecoderLayer(block=block(weights), cache=cache)
