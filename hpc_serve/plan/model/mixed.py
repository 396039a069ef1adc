"""Mixtures of experts whose layers differ in their attention: in heads, widths and windows, with gates or without."""

from __future__ import annotations

from hpc_serve.plan.model.config_check import CheckedConfig
from hpc_serve.plan.model.dense import window_cache
from hpc_serve.plan.model.layers import HeadSizes, LayerBuilder, block
from hpc_serve.plan.model.moe import has_experts
from hpc_serve.plan.model.scheme import FP32
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Part, Weight

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_mlp_layernorm", "post_mlp_layernorm")


def laguna(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Laguna: as many heads in a layer as the config says for it, and a gate for each head or each of its elements."""
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
    shared = builder.get("shared_expert_intermediate_size", 0)
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias, sizes=sizes),
        gate,
        builder.query_key_norms(f"{prefix}.self_attn"),
        _experts_or_dense(builder, index, "num_experts", shared, wide_router=False),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def mimo_v2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """MiMo-V2: values narrower than keys, and layers with a window that have other heads and a sink for each."""
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
        _experts_or_dense(
            builder, index, "n_routed_experts", 0, correction=builder.get("topk_method", "noaux_tc") == "noaux_tc"
        ),
        builder.norms(*_TWO_NORMS),
    )
    window = builder.require("sliding_window") if slides else 0
    return DecoderLayer(block=weights, cache=builder.cache(window, "sliding" if slides else "full", sizes))


_SWA_HEADS_FACTOR = 2
"""KV heads of MiMo-V2's layers with a window, where a config does not have their number: transformers' default."""


def hy_v3(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Hunyuan 3: norms over queries and keys, a shared expert, routers in 32 bit."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    size = builder.either("moe_intermediate_size", "expert_hidden_dim", 0)
    norms = builder.query_key_norms(f"{prefix}.self_attn") if builder.get("qk_norm", True) else []
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        norms,
        _experts_or_dense(builder, index, "num_experts", size * builder.get("num_shared_experts", 0), size=size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def afmoe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Arcee's Trinity: four norms, a gate of the heads' width, full attention in every fourth layer."""
    prefix = f"model.layers.{index}"
    size = builder.require("moe_intermediate_size")
    dense, count = builder.get("num_dense_layers", 0), builder.require("num_experts")
    if index < dense:
        half = builder.mlp(f"{prefix}.mlp", builder.intermediate_size)
    else:
        half = builder.router(f"{prefix}.mlp", count, correction=True, scheme=FP32)
        half += builder.experts(f"{prefix}.mlp", count, size)
        shared = builder.get("num_shared_experts", 0)
        half += builder.mlp(f"{prefix}.mlp.shared_experts", size * shared) if shared else []
    weights = block(
        builder.attention(f"{prefix}.self_attn"),
        builder.query_key_norms(f"{prefix}.self_attn"),
        [
            builder.linear(
                f"{prefix}.self_attn.gate_proj",
                builder.hidden_size,
                [Part(builder.heads, builder.head_dim)],
                "column",
            )
        ],
        half,
        builder.norms(*_FOUR_NORMS),
    )
    pattern = builder.get("global_attn_every_n_layers", 4)
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=pattern))


def ernie4_5_moe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """ERNIE 4.5 with experts, from a first layer to a last one, every so many layers."""
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


def mellum(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Mellum 2: Qwen 3's attention, windows in some layers."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        builder.query_key_norms(f"{prefix}.self_attn"),
        _experts_or_dense(builder, index, "num_local_experts", 0, correction=False, wide_router=False),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def step3p5(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Step 3.5 and 3.7: layers with a window have other heads, and each head has a gate."""
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
    shared = builder.require("share_expert_dim")
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, sizes=sizes),
        builder.query_key_norms(f"{prefix}.self_attn"),
        [gate] if builder.get("use_head_wise_attn_gate", True) else [],
        _experts_or_dense(builder, index, "n_routed_experts", shared),
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


def _experts_or_dense(
    builder: LayerBuilder,
    index: int,
    count_key: str,
    shared: int,
    *,
    correction: bool = True,
    size: int | None = None,
    wide_router: bool = True,
) -> list[Weight]:
    """The MLP of a layer: dense, or routed experts with a shared one of `shared` features.

    `wide_router`: the router is in 32 bit.
    """
    prefix = f"model.layers.{index}.mlp"
    if not has_experts(builder, index):
        return builder.mlp(prefix, builder.intermediate_size)
    count = builder.require(count_key)
    weights = builder.router(prefix, count, correction=correction, scheme=FP32 if wide_router else None)
    weights += builder.experts(prefix, count, size or builder.require("moe_intermediate_size"))
    return weights + (builder.mlp(f"{prefix}.shared_expert", shared) if shared else [])
