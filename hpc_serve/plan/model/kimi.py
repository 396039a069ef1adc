"""Kimi Linear and Kimi K3: delta attention with a state of fixed size in most layers, latent attention in the others.

Source: vLLM's models/kimi_k3 (nvidia/model.py, kda.py, mla.py).
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.latent import latent_attention
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.moe import has_experts
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight


def kimi_linear(builder: LayerBuilder) -> DecoderLayer:
    """Return a layer of Kimi Linear or Kimi K3. The config counts layers from 1."""
    linear = builder.require("linear_attn_config")
    is_delta, is_full = (builder.index + 1 in linear[kind] for kind in ("kda_layers", "full_attn_layers"))
    if is_delta == is_full:
        raise InvalidRequestError(
            f"The config's kda_layers and full_attn_layers must name each layer once: see layer {builder.index + 1}."
        )
    norms = builder.two_norms()
    if builder.get("attn_res_block_size") is not None:
        norms += builder.norms("self_attention_res_norm", "mlp_res_norm")
        norms += builder.norms("self_attention_res_proj", "mlp_res_proj")
    if is_delta:
        return decoder_layer(*_delta_attention(builder), _kimi_half(builder), norms)
    cache, mixer, derived = latent_attention(builder, gated=builder.flag("mla_use_output_gate"))
    return decoder_layer(cache, mixer, _kimi_half(builder), norms, derived=derived)


def _delta_attention(builder: LayerBuilder) -> tuple[LayerCache, list[Weight]]:
    """Return Kimi's delta attention. Its gate has one matrix in K3, and two of low rank before K3."""
    config = builder.require("linear_attn_config")
    heads, width, kernel = config["num_heads"], config["head_dim"], config["short_conv_kernel_size"]
    inner, hidden = Part(heads, width), builder.hidden_size
    has_full_gate = bool(config.get("use_full_rank_gate", False))
    fused = [inner] * (4 if has_full_gate else 3)
    weights: list[Weight] = [
        builder.linear("self_attn.q_proj", hidden, [*fused, heads], "column"),
        builder.linear("self_attn.f_a_proj", hidden, [width]),
        builder.linear("self_attn.f_b_proj", width, [inner], "column"),
        builder.vector("self_attn.dt_bias", inner.size, split=True, element_bytes=4),
        builder.vector("self_attn.conv1d", 3 * inner.size * kernel, split=True, element_bytes=4),
        builder.vector("self_attn.A_log", heads, split=True, element_bytes=4),
        builder.vector("self_attn.o_norm", width),
        builder.linear("self_attn.o_proj", inner, [hidden], "row"),
    ]
    if not has_full_gate:
        weights += [
            builder.linear("self_attn.g_a_proj", hidden, [width]),
            builder.linear("self_attn.g_b_proj", width, [inner], "column"),
        ]
    state = ((3 * inner.size * (kernel - 1), 0), (heads * width * width, 4))
    return LayerCache(kind="state", state=state), weights


def _kimi_half(builder: LayerBuilder) -> list[Weight]:
    """Return the MLP: dense, or experts, which in K3 work on a projection of the hidden state."""
    count = builder.get("num_experts", 0)
    if not count or not has_experts(builder):
        return builder.mlp("mlp", builder.intermediate_size)
    name, size = "block_sparse_moe", builder.require("moe_intermediate_size")
    latent = builder.get("routed_expert_hidden_size")
    weights = builder.router(name, count, correction=True)
    weights += builder.experts(f"{name}.experts", count, size, hidden_size=latent)
    if latent:
        weights += [
            builder.linear(f"{name}.routed_expert_down_proj", builder.hidden_size, [latent]),
            builder.linear(f"{name}.routed_expert_up_proj", latent, [builder.hidden_size]),
        ]
        if builder.get("latent_moe_use_norm"):
            weights.append(builder.vector(f"{name}.routed_expert_norm", latent))
    shared = builder.get("num_shared_experts", 0)
    return weights + (builder.mlp(f"{name}.shared_experts", size * shared) if shared else [])
