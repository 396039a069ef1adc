"""Families that need code: one function for one layer of each. ordinary.py has the others.

Falcon runs attention and MLP in parallel. Nemotron's layers lack parts, Llama 4 attends within chunks. Laguna, MiMo-V2
and Step 3.5 have layers with other heads, and ERNIE 4.5 says in its own fields which layers have experts.
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config_check import CheckedConfig
from hpc_serve.plan.model.layers import HeadSizes, LayerBuilder, block
from hpc_serve.plan.model.moe import experts_or_dense
from hpc_serve.plan.model.ordinary import window_cache
from hpc_serve.plan.model.scheme import FP32
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Block, Part, Vocabulary, Weight

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_SWA_HEADS_FACTOR = 2
"""KV heads of MiMo-V2's layers with a window, where a config does not have their number: transformers' default."""


def falcon(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of Falcon: no gate.

    Attention and MLP run in parallel after one norm with bias, or each after its own norm.
    """
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
    """Build a layer of Nemotron from architecture search.

    Each layer has its own KV heads and MLP size, or lacks one of the two.
    """
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


def llama4(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of Llama 4.

    Every `interleave_moe_layer_step`-th layer has experts. Three of four layers attend within chunks.
    """
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    step, sparse = builder.get("interleave_moe_layer_step", 1), builder.get("moe_layers")
    has_experts = bool(step) and (index + 1) % step == 0
    if sparse is not None and (index in sparse) != has_experts:
        raise InvalidRequestError(
            f"The config's moe_layers and interleave_moe_layer_step do not agree about layer {index}."
        )
    if has_experts:
        count = builder.require("num_local_experts")
        half = builder.router(f"{prefix}.feed_forward", count)
        half += builder.experts(f"{prefix}.feed_forward", count, builder.intermediate_size)
        half += builder.mlp(f"{prefix}.feed_forward.shared_expert", builder.intermediate_size)
    else:
        half = builder.mlp(f"{prefix}.feed_forward", builder.require("intermediate_size_mlp"))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias), half, builder.norms(*_TWO_NORMS)
    )
    chunk, without_rope = builder.get("attention_chunk_size", 0), builder.get("no_rope_layers")
    interval, kinds = builder.get("no_rope_layer_interval", 4), builder.get("layer_types")
    has_chunks = bool(chunk) and bool(without_rope[index] if without_rope else (index + 1) % interval)
    if chunk and kinds and (kinds[index] == "chunked_attention") != has_chunks:
        raise InvalidRequestError(f"The config's layer_types and no_rope_layers do not agree about layer {index}.")
    return DecoderLayer(block=weights, cache=builder.cache(chunk, "chunked") if has_chunks else builder.cache())


def laguna(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of Laguna: as many heads as the config says for it, and a gate per head or per element."""
    prefix = f"model.layers.{index}"
    each, gating = builder.get("num_attention_heads_per_layer"), builder.get("gating", True)
    sizes = builder.head_sizes(heads=each[index] if each else None)
    bias = bool(builder.get("attention_bias", False))
    gate: list[Weight] = []
    if gating:
        width = 1 if gating is True or gating == "per-head" else sizes.head_dim
        gate.append(
            builder.linear(f"{prefix}.self_attn.g_proj", builder.hidden_size, [Part(sizes.heads, width)], "column")
        )
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias, sizes=sizes),
        gate,
        builder.query_key_norms(f"{prefix}.self_attn"),
        experts_or_dense(
            builder,
            index,
            f"{prefix}.mlp",
            count="num_experts",
            dense_by_layer=True,
            correction=True,
            shared_size="shared_expert_intermediate_size",
            shared_name="shared_expert",
        ),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def mimo_v2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of MiMo-V2: values are narrower than keys.

    Layers with a window have other heads and a sink for each head.
    """
    prefix = f"model.layers.{index}"
    pattern, kinds = builder.get("hybrid_layer_pattern"), builder.get("layer_types")
    slides = bool(pattern[index]) if pattern else bool(kinds) and kinds[index] == "sliding_attention"
    sizes = builder.head_sizes(value_dim=builder.get("v_head_dim"))
    if slides:
        sizes = HeadSizes(
            heads=builder.get("swa_num_attention_heads", sizes.heads),
            kv_heads=builder.get("swa_num_key_value_heads", _SWA_HEADS_FACTOR * sizes.kv_heads),
            head_dim=builder.get("swa_head_dim", sizes.head_dim),
            value_dim=builder.get("swa_v_head_dim", sizes.value_dim),
        )
    has_sinks = bool(builder.get("add_swa_attention_sink_bias" if slides else "add_full_attention_sink_bias", slides))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False)), sizes=sizes),
        [builder.vector(f"{prefix}.self_attn.sinks", sizes.heads, split=True)] if has_sinks else [],
        experts_or_dense(
            builder,
            index,
            f"{prefix}.mlp",
            count="n_routed_experts",
            dense_by_layer=True,
            correction=builder.get("topk_method", "noaux_tc") == "noaux_tc",
            wide_router=True,
        ),
        builder.norms(*_TWO_NORMS),
    )
    window = builder.require("sliding_window") if slides else 0
    return DecoderLayer(block=weights, cache=builder.cache(window, "sliding" if slides else "full", sizes))


def step3p5(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of Step 3.5 and 3.7: layers with a window have other heads, and each head has a gate."""
    prefix = f"model.layers.{index}"
    kinds = builder.get("layer_types")
    slides = bool(kinds) and kinds[index] == "sliding_attention"
    other = builder.get("attention_other_setting")
    sizes = builder.head_sizes()
    if slides and other:
        sizes = builder.head_sizes(
            heads=other["num_attention_heads"], kv_heads=other["num_attention_groups"], head_dim=other["head_dim"]
        )
    elif slides:
        sizes = builder.head_sizes(heads=builder.get("num_sliding_attention_heads"))
    bias = bool(builder.get("attention_bias", False))
    gate = builder.linear(f"{prefix}.self_attn.g_proj", builder.hidden_size, [sizes.heads], "column")
    builder.require("share_expert_dim")
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, sizes=sizes),
        builder.query_key_norms(f"{prefix}.self_attn"),
        [gate] if builder.get("use_head_wise_attn_gate", True) else [],
        experts_or_dense(
            builder,
            index,
            f"{prefix}.mlp",
            count="n_routed_experts",
            dense_by_layer=True,
            correction=True,
            wide_router=True,
            shared_size="share_expert_dim",
            shared_name="shared_expert",
        ),
        builder.norms(*_TWO_NORMS),
    )
    window = builder.require("sliding_window") if slides else 0
    return DecoderLayer(block=weights, cache=builder.cache(window, "sliding" if slides else "full", sizes))


def step3p5_fields(config: CheckedConfig) -> None:
    """Write Step 3.5's own names as those of others: of KV heads, of experts, and of the layers that have them."""
    for own, name in (("num_attention_groups", "num_key_value_heads"), ("moe_num_experts", "n_routed_experts")):
        value = config.get(own)
        if value is not None:
            config.setdefault(name, value)
    named = config.get("moe_layers_enum")
    if named is not None and config.peek("mlp_layer_types") is None:
        sparse = {int(one) for one in named.split(",")}
        layers = range(config["num_hidden_layers"])
        config["mlp_layer_types"] = ["sparse" if index in sparse else "dense" for index in layers]


def ernie4_5_moe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of ERNIE 4.5 with experts, from a first layer to a last one, every so many layers."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("use_bias", False))
    count, size = builder.require("moe_num_experts"), builder.require("moe_intermediate_size")
    first = _lowest(builder.get("moe_layer_start_index", 0))
    last = builder.get("moe_layer_end_index", -1)
    last = builder.num_layers - 1 if last == -1 else last
    kinds = builder.get("mlp_layer_types")
    is_sparse = first <= index <= last and (index + 1) % builder.get("moe_layer_interval", 1) == 0
    if kinds[index] == "sparse" if kinds else is_sparse:
        half = builder.router(f"{prefix}.mlp", count, correction=True, scheme=FP32)
        half += builder.experts(f"{prefix}.mlp", count, size)
        shared = builder.get("moe_num_shared_experts", 0)
        half += builder.mlp(f"{prefix}.mlp.shared_experts", size * shared, bias=bias) if shared else []
    else:
        half = builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bias)
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias), half, builder.norms(*_TWO_NORMS)
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def _lowest(value: int | list[int]) -> int:
    return min(value) if isinstance(value, list) else value


def head_bias(builder: LayerBuilder) -> Block:
    """Return the bias of Phi-3.5-MoE's output head, which ranks divide with the head."""
    return Block(weights=(Vocabulary(name="lm_head.bias", rows=builder.vocab_size, width=1),))
