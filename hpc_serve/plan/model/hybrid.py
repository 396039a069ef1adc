"""Hybrid models: some layers keep a state of fixed size, the others have ordinary attention.

Qwen3-Next and Qwen 3.5 have gated delta nets, LFM2 has short convolutions. Nemotron-H, Granite 4 and Falcon-H1 have
Mamba 2, Jamba has the first Mamba.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer, experts_or_dense, qwen_feed_forward
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache, Part, Weight, round_up

_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def qwen3_next(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Qwen3-Next.

    Every fourth layer has attention with a gate on its output, the others are gated delta nets.
    """
    return _qwen_hybrid(builder, ("in_proj_qkvz", "in_proj_ba"))


def qwen3_5(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Qwen 3.5 to 3.8, dense or with experts: the layers of Qwen3-Next, stored in more tensors."""
    return _qwen_hybrid(builder.named("model.language_model.layers"), ("in_proj_qkv", "in_proj_b"))


def _qwen_hybrid(builder: LayerBuilder, names: tuple[str, str]) -> DecoderLayer:
    kind, interval = builder.of_layer("layer_types"), builder.get("full_attention_interval", 4)
    attends = kind == "full_attention" if kind else (builder.index + 1) % interval == 0
    if attends:
        mixer = builder.attention("self_attn", bias=builder.flag("qkv_bias"), gated=True)
        mixer += builder.query_key_norms()
        cache = builder.cache()
    else:
        cache, mixer = _gated_delta_net(builder, "linear_attn", names)
    return decoder_layer(cache, mixer, qwen_feed_forward(builder, "mlp"), builder.two_norms())


def _gated_delta_net(builder: LayerBuilder, prefix: str, names: tuple[str, str]) -> tuple[LayerCache, list[Weight]]:
    key_heads, key_dim = builder.require("linear_num_key_heads"), builder.require("linear_key_head_dim")
    value_heads, value_dim = builder.require("linear_num_value_heads"), builder.require("linear_value_head_dim")
    kernel = builder.get("linear_conv_kernel_dim", 4)
    keys, values = Part(key_heads, key_dim), Part(value_heads, value_dim)
    convolved = 2 * keys.size + values.size
    weights: list[Weight] = [
        builder.linear(f"{prefix}.{names[0]}", builder.hidden_size, [keys, keys, values, values], "column"),
        builder.linear(f"{prefix}.{names[1]}", builder.hidden_size, [value_heads, value_heads], "column"),
        builder.vector(f"{prefix}.conv1d", convolved * kernel, split=True),
        builder.vector(f"{prefix}.dt_bias", value_heads, split=True),
        builder.vector(f"{prefix}.A_log", value_heads, split=True, element_bytes=4),
        builder.vector(f"{prefix}.norm", value_dim),
        builder.linear(f"{prefix}.out_proj", values, [builder.hidden_size], "row"),
    ]
    state = ((convolved * (kernel - 1), 0), (value_heads * value_dim * key_dim, _state_bytes(builder)))
    return LayerCache(kind="state", state=state), weights


def nemotron_h(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Nemotron-H.

    The config has a letter for each layer: Mamba (M), attention (*), MLP (-) or experts (E).
    """
    builder = builder.named("backbone.layers")
    kind = builder.of_layer("hybrid_override_pattern", is_needed=True)
    cache = None
    if kind == "M":
        # 32 bit where the config does not say: NemotronHForCausalLMConfig in vLLM's models/config.py
        cache, mixer = _mamba2(builder, "mixer", state_bytes=4)
    elif kind == "*":
        cache, mixer = builder.cache(), builder.attention("mixer")
    elif kind == "-":
        mixer = builder.mlp("mixer", builder.intermediate_size, bias=builder.flag("mlp_bias"), gated=False)
    elif kind == "E":
        mixer = _squared_relu_experts(builder)
    else:
        raise InvalidRequestError(f"hybrid_override_pattern has the letter {kind!r}: use M, *, - or E.")
    return decoder_layer(cache, mixer, builder.norms("norm"))


def nemotron_h_fields(config: CheckedConfig) -> None:
    """Write the layers as letters where a config names their kinds, as transformers 5 does."""
    kinds = config.get("layers_block_type")
    if not kinds:
        return
    unknown = sorted({str(kind) for kind in kinds} - set(_LETTERS))
    if unknown:
        raise InvalidRequestError(f"The config's layers_block_type has {unknown[0]!r}: use {', '.join(_LETTERS)}.")
    letters = "".join(_LETTERS[kind] for kind in kinds)
    if config.get("hybrid_override_pattern", letters) != letters:
        raise InvalidRequestError("The config's hybrid_override_pattern and layers_block_type name different layers.")
    config["hybrid_override_pattern"] = letters
    config.setdefault("num_hidden_layers", len(letters))


def lfm2(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of LFM2 or LFM2.5: attention in some layers, a gated convolution over a few tokens in the
    others."""
    size = builder.either("intermediate_size", "block_ff_dim", 0)
    factor, multiple = builder.get("block_ffn_dim_multiplier", 1.0), builder.get("block_multiple_of", 256)
    if builder.get("block_auto_adjust_ff_dim", True):
        size = round_up(int(factor * int(2 * size / 3)), multiple)
    feed_forward = builder.mlp("feed_forward", size)
    return decoder_layer(*_lfm2_mixer(builder), feed_forward, builder.norms("operator_norm", "ffn_norm"))


def lfm2_moe(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of LFM2 with experts after the first layers."""
    correction = ("use_expert_bias", True, True)
    feed_forward = experts_or_dense(
        builder, "feed_forward", count="num_experts", dense_before="num_dense_layers", correction=correction
    )
    return decoder_layer(*_lfm2_mixer(builder), feed_forward, builder.norms("operator_norm", "ffn_norm"))


def _lfm2_mixer(builder: LayerBuilder) -> tuple[LayerCache, list[Weight]]:
    kind, attending = builder.of_layer("layer_types"), builder.get("full_attn_idxs")
    if kind and attending and (kind == "full_attention") != (builder.index in attending):
        raise builder.disagreement("layer_types and full_attn_idxs")
    if kind == "full_attention" if kind else attending is None or builder.index in attending:
        mixer = builder.attention("self_attn") + builder.query_key_norms()
        return builder.cache(), mixer
    width, kernel = builder.get("conv_dim", builder.hidden_size), builder.require("conv_L_cache")
    bias = builder.flag("conv_bias")
    weights: list[Weight] = [
        builder.linear("conv.in_proj", width, [width] * 3, "column", bias=bias),
        builder.vector("conv.conv", width * (kernel + bias), split=True),
        builder.linear("conv.out_proj", width, [width], "row", bias=bias),
    ]
    return LayerCache(kind="state", state=((width * (kernel - 1), 0),)), weights


def _mamba2(
    builder: LayerBuilder, prefix: str, *, has_norm: bool = True, state_bytes: int = 0
) -> tuple[LayerCache, list[Weight]]:
    """Return the state of a Mamba 2 mixer, and its weights.

    Where the config says nothing, `has_norm` and `state_bytes` (of an element; 0: the model's type) count.
    """
    heads, head_dim = builder.require("mamba_num_heads"), builder.require("mamba_head_dim")
    groups, state_size = builder.require("n_groups"), builder.require("ssm_state_size")
    kernel = builder.get("conv_kernel", 4)
    # vLLM copies one group to all ranks, and refuses to divide several that ranks do not divide
    inner, group = Part(heads, head_dim), Part(groups, state_size, replicate=groups == 1)
    bias = builder.flag("use_bias")
    conv_bias = 1 if builder.get("use_conv_bias", True) else 0
    norm = [builder.vector(f"{prefix}.norm", inner.size, split=True)]
    weights: list[Weight] = [
        builder.linear(
            f"{prefix}.in_proj", builder.hidden_size, [inner, inner, group, group, heads], "column", bias=bias
        ),
        builder.vector(f"{prefix}.conv1d", inner.size * (kernel + conv_bias), split=True),
        builder.vector(f"{prefix}.conv1d.groups", 2 * group.size * (kernel + conv_bias), split=True, units=groups),
        builder.vector(f"{prefix}.A_log", heads, split=True, element_bytes=4),
        builder.vector(f"{prefix}.D", heads, split=True),
        builder.vector(f"{prefix}.dt_bias", heads, split=True),
        *(norm if builder.get("mamba_rms_norm", has_norm) else []),
        builder.linear(f"{prefix}.out_proj", inner, [builder.hidden_size], "row", bias=bias),
    ]
    state = ((inner.size * (kernel - 1), 0), (heads * head_dim * state_size, _state_bytes(builder) or state_bytes))
    by_group = Part(groups, 2 * state_size * (kernel - 1), replicate=True)
    return LayerCache(kind="state", state=state, state_groups=by_group), weights


def _squared_relu_experts(builder: LayerBuilder) -> list[Weight]:
    count, size = builder.require("n_routed_experts"), builder.require("moe_intermediate_size")
    shared = builder.get("moe_shared_expert_intermediate_size", 0) * builder.get("n_shared_experts", 1)
    latent, bias = builder.get("moe_latent_size"), builder.flag("mlp_bias")
    weights = builder.router("mixer", count, correction=True)
    weights += builder.experts("mixer.experts", count, size, hidden_size=latent, gated=False)
    if latent:
        weights += [
            builder.linear("mixer.fc1_latent_proj", builder.hidden_size, [latent], bias=bias),
            builder.linear("mixer.fc2_latent_proj", latent, [builder.hidden_size], bias=bias),
        ]
    return weights + (builder.mlp("mixer.shared_experts", shared, bias=bias, gated=False) if shared else [])


def _state_bytes(builder: LayerBuilder) -> int:
    """Return the bytes of an element of the recurrent state. 0: the model's type."""
    name = builder.get("mamba_ssm_cache_dtype", builder.get("mamba_ssm_dtype"))
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(name), 0)


def granite_hybrid(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Granite 4: attention or Mamba 2, then experts, a shared MLP, or both."""
    if builder.of_layer("layer_types", is_needed=True) in ("attention", "full_attention"):
        bias = builder.flag("attention_bias")
        cache, mixer = builder.cache(), builder.attention("self_attn", bias=bias, output_bias=bias)
    else:
        cache, mixer = _mamba2(builder, "mamba")
    shared = builder.get("shared_intermediate_size", 0)
    feed_forward = builder.mlp("shared_mlp", shared) if shared else []
    if builder.get("num_local_experts", 0):
        moe = "block_sparse_moe"
        feed_forward += experts_or_dense(builder, moe, count="num_local_experts", size="intermediate_size")
    return decoder_layer(cache, mixer, feed_forward, builder.two_norms())


def falcon_h1(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Falcon-H1: attention and Mamba 2 side by side, which both keep a cache, then an MLP."""
    inner = builder.require("mamba_num_heads") * builder.require("mamba_head_dim")
    width = builder.get("mamba_d_ssm", builder.get("mamba_expand", 2) * builder.hidden_size)
    if width != inner:
        raise InvalidRequestError(f"The config's mamba_d_ssm is {width} and its mamba_n_heads have {inner} in all.")
    state, mixer = _mamba2(builder, "mamba", has_norm=False)
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
        feed_forward = experts_or_dense(builder, "feed_forward", count="num_experts", size="intermediate_size")
    else:
        feed_forward = builder.mlp("feed_forward", builder.intermediate_size)
    return decoder_layer(cache, mixer, feed_forward, builder.norms("input_layernorm", "pre_ff_layernorm"))


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
