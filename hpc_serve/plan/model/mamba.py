"""Hybrids of attention and Mamba: Granite 4 and Falcon-H1 with Mamba 2, and Jamba with the first Mamba."""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.hybrid import mamba2
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.moe import experts_or_dense
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Weight


def granite_hybrid(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Granite 4: attention or Mamba 2, then experts, a shared MLP, or both."""
    if builder.of_layer("layer_types", is_needed=True) in ("attention", "full_attention"):
        bias = builder.flag("attention_bias")
        cache, mixer = builder.cache(), builder.attention("self_attn", bias=bias, output_bias=bias)
    else:
        cache, mixer = mamba2(builder, "mamba")
    shared = builder.get("shared_intermediate_size", 0)
    half = builder.mlp("shared_mlp", shared) if shared else []
    if builder.get("num_local_experts", 0):
        moe = "block_sparse_moe"
        half += experts_or_dense(builder, moe, count="num_local_experts", size="intermediate_size")
    return decoder_layer(cache, mixer, half, builder.two_norms())


def falcon_h1(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Falcon-H1: attention and Mamba 2 side by side, which both keep a cache, then an MLP."""
    inner = builder.require("mamba_num_heads") * builder.require("mamba_head_dim")
    width = builder.get("mamba_d_ssm", builder.get("mamba_expand", 2) * builder.hidden_size)
    if width != inner:
        raise InvalidRequestError(f"The config's mamba_d_ssm is {width} and its mamba_n_heads have {inner} in all.")
    state, mixer = mamba2(builder, "mamba", has_norm=False)
    cache = replace(builder.cache(), state=state.state, state_groups=state.state_groups)
    return decoder_layer(
        cache,
        builder.attention("self_attn"),
        mixer,
        builder.mlp("feed_forward", builder.intermediate_size),
        builder.norms("input_layernorm", "pre_ff_layernorm"),
    )


def jamba(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Jamba: attention in every `attn_layer_period`-th layer, experts by a period of their own."""
    if builder.index % builder.get("attn_layer_period", 8) == builder.get("attn_layer_offset", 4):
        cache, mixer = builder.cache(), builder.attention("self_attn")
    else:
        cache, mixer = _mamba1(builder, "mamba")
    count = builder.get("num_experts", 16)
    if count > 1 and builder.index % builder.get("expert_layer_period", 2) == builder.get("expert_layer_offset", 1):
        half = experts_or_dense(builder, "feed_forward", count="num_experts", size="intermediate_size")
    else:
        half = builder.mlp("feed_forward", builder.intermediate_size)
    return decoder_layer(cache, mixer, half, builder.norms("input_layernorm", "pre_ff_layernorm"))


def _mamba1(builder: LayerBuilder, prefix: str) -> tuple[LayerCache, list[Weight]]:
    """Return the state of the first Mamba's mixer, and its weights, which vLLM never quantizes."""
    hidden, state_size = builder.hidden_size, builder.get("mamba_d_state", 16)
    kernel, inner = builder.get("mamba_d_conv", 4), builder.get("mamba_expand", 2) * builder.hidden_size
    rank = builder.get("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)  # "auto"
    bias, conv_bias = builder.flag("mamba_proj_bias"), builder.flag("mamba_conv_bias", default=True)
    weights: list[Weight] = [
        builder.linear(f"{prefix}.in_proj", hidden, [inner, inner], "column", bias=bias, plain=True),
        builder.vector(f"{prefix}.conv1d", inner * (kernel + conv_bias), split=True),
        builder.linear(f"{prefix}.x_proj", inner, [rank + 2 * state_size], "row", plain=True),
        builder.linear(f"{prefix}.dt_proj", rank, [inner], "column", bias=True, plain=True),
        builder.vector(f"{prefix}.A_log", inner * state_size, split=True, element_bytes=4),
        builder.vector(f"{prefix}.D", inner, split=True),
        builder.vector(f"{prefix}.norms", rank + 2 * state_size),
        builder.linear(f"{prefix}.out_proj", inner, [hidden], "row", bias=bias, plain=True),
    ]
    return LayerCache(kind="state", state=((inner * (kernel - 1), 0), (inner * state_size, 0))), weights
