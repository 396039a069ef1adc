"""Decoders with latent attention, which caches one vector for all heads. Some attend to chosen tokens only.

Sources: vLLM's model_executor/models/deepseek_v2.py and models/deepseek_v32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.moe import deepseek_half
from hpc_serve.plan.model.ordinary import ordinary_layer
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight

_INDEX_SCALE_BLOCK = 128
"""Elements of an indexer's key that share a scale of 32 bit."""


def latent_attention(builder: LayerBuilder, *, gated: bool = False) -> tuple[LayerCache, list[Weight], list[Weight]]:
    """Return a cache of one vector for all heads, latent attention, and the weights that vLLM derives when it loads.

    Each rank holds the low-rank projections whole, and ranks divide the heads' projections. `gated`: the output has a
    gate of its width. From an expanding matrix in 16 bit nothing is derived: vLLM uses its parts where they are
    (`split_kv_b_proj` in layers/attention/mla_attention.py).
    """
    nope, rope = builder.require("qk_nope_head_dim"), builder.require("qk_rope_head_dim")
    value, latent = builder.require("v_head_dim"), builder.require("kv_lora_rank")
    query = Part(builder.heads, nope + rope)
    rank = builder.get("q_lora_rank")
    first = [rank, latent + rope] if rank else [latent + rope]
    weights: list[Weight] = [builder.linear("self_attn.kv_a_proj_with_mqa", builder.hidden_size, first)]
    if rank:
        weights.append(builder.vector("self_attn.q_a_layernorm", rank))
        weights.append(builder.linear("self_attn.q_b_proj", rank, [query], "column"))
    else:
        weights.append(builder.linear("self_attn.q_proj", builder.hidden_size, [query], "column"))
    if gated:
        weights.append(builder.linear("self_attn.g_proj", builder.hidden_size, [Part(builder.heads, value)], "column"))
    per_head = Part(builder.heads, nope + value)
    expanding = builder.linear("self_attn.kv_b_proj", latent, [per_head], "column")
    weights += [
        builder.vector("self_attn.kv_a_layernorm", latent),
        expanding,
        builder.linear("self_attn.o_proj", Part(builder.heads, value), [builder.hidden_size], "row"),
    ]
    absorbed = builder.linear("absorbed_kv_b_proj", latent, [per_head], "column", plain=True)
    cache = LayerCache(kind="mla", kv_heads=1, head_dim=latent + rope)
    return cache, weights, [] if expanding.scheme.weight_bits == 16 else [absorbed]


def deepseek(builder: LayerBuilder, *, indexer: Sequence[Weight] = (), chosen_tokens: int = 0) -> DecoderLayer:
    """Build a layer of DeepSeek V2, V3, R1 and Kimi K2, also with images (K2.5)."""
    cache, attention, derived = latent_attention(builder)
    cache, half = replace(cache, chosen_tokens=chosen_tokens), deepseek_half(builder, "mlp")
    return decoder_layer(cache, attention, indexer, half, builder.two_norms(), derived=derived)


def mistral3(builder: LayerBuilder) -> DecoderLayer:
    """Return the decoder of Mistral 3's models with images: Mistral's own, or from Small 4 on DeepSeek's."""
    if builder.get("model_type") == "mistral4":
        return deepseek(builder)
    return ordinary_layer(builder, name="llama")


def deepseek_sparse(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of DeepSeek V3.2 or GLM-5.

    An indexer with its own cache chooses the tokens that a layer attends to.
    """
    chosen = builder.require("index_topk")
    if not _has_indexer(builder):
        return deepseek(builder, chosen_tokens=chosen)
    heads, width = builder.require("index_n_heads"), builder.require("index_head_dim")
    indexer: list[Weight] = [
        builder.linear("self_attn.indexer.wq_b", builder.require("q_lora_rank"), [heads * width]),
        builder.linear("self_attn.indexer.wk_weights_proj", builder.hidden_size, [width, heads], plain=True),
        builder.vector("self_attn.indexer.k_norm", 2 * width, element_bytes=4),
    ]
    layer = deepseek(builder, indexer=indexer, chosen_tokens=chosen)
    assert layer.cache is not None
    index_bytes = width + width // _INDEX_SCALE_BLOCK * 4
    return replace(layer, cache=replace(layer.cache, index_bytes=index_bytes, index_flops=2 * heads * width))


def _has_indexer(builder: LayerBuilder) -> bool:
    """Return whether a layer has an indexer, or takes the tokens of the layer before: `skip_topk` in vLLM."""
    kind, letter = builder.of_layer("indexer_types"), builder.of_layer("index_topk_pattern")
    frequency, offset = builder.get("index_topk_freq", 1), builder.get("index_skip_topk_offset", 2)
    found: bool = letter != "S" if letter else max(builder.index - offset + 1, 0) % frequency == 0
    if kind and (kind == "full") != found:
        raise builder.disagreement("indexer_types and index_topk_freq")
    return found
