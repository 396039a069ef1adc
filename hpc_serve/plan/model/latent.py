"""Decoders with latent attention, which caches one vector for all heads. Some attend to chosen tokens only.

Sources: vLLM's model_executor/models/deepseek_v2.py and models/deepseek_v32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.moe import deepseek_half
from hpc_serve.plan.model.ordinary import ordinary_layer
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Block, Linear, Part, Weight

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_INDEX_SCALE_BLOCK = 128
"""Elements of an indexer's key that share a scale of 32 bit."""


def latent_attention(builder: LayerBuilder, prefix: str, *, gated: bool = False) -> list[Weight]:
    """Return latent attention: each rank holds the low-rank projections whole, and ranks divide the heads' projections.

    `gated`: the output has a gate of its width.
    """
    nope, rope = builder.require("qk_nope_head_dim"), builder.require("qk_rope_head_dim")
    value, latent = builder.require("v_head_dim"), builder.require("kv_lora_rank")
    query = Part(builder.heads, nope + rope)
    rank = builder.get("q_lora_rank")
    weights: list[Weight] = []
    if rank:
        first: list[Part | int] = [rank, latent + rope]
        weights += [
            builder.linear(f"{prefix}.kv_a_proj_with_mqa", builder.hidden_size, first),
            builder.vector(f"{prefix}.q_a_layernorm", rank),
            builder.linear(f"{prefix}.q_b_proj", rank, [query], "column"),
        ]
    else:
        weights += [
            builder.linear(f"{prefix}.kv_a_proj_with_mqa", builder.hidden_size, [latent + rope]),
            builder.linear(f"{prefix}.q_proj", builder.hidden_size, [query], "column"),
        ]
    if gated:
        weights.append(builder.linear(f"{prefix}.g_proj", builder.hidden_size, [Part(builder.heads, value)], "column"))
    return [
        *weights,
        builder.vector(f"{prefix}.kv_a_layernorm", latent),
        builder.linear(f"{prefix}.kv_b_proj", latent, [Part(builder.heads, nope + value)], "column"),
        builder.linear(f"{prefix}.o_proj", Part(builder.heads, value), [builder.hidden_size], "row"),
    ]


def deepseek(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of DeepSeek V2, V3, R1 and Kimi K2, also with images (K2.5)."""
    return _latent_layer(builder, index, [])


def mistral3(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Return the decoder of Mistral 3's models with images: Mistral's own, or from Small 4 on DeepSeek's."""
    if builder.get("model_type") == "mistral4":
        return deepseek(builder, index)
    return ordinary_layer(builder, index, name="llama")


def deepseek_sparse(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of DeepSeek V3.2 or GLM-5.

    An indexer with its own cache chooses the tokens that a layer attends to.
    """
    chosen = builder.require("index_topk")
    if not _has_indexer(builder, index):
        return _latent_layer(builder, index, [], chosen_tokens=chosen)
    name = f"model.layers.{index}.self_attn.indexer"
    heads, width = builder.require("index_n_heads"), builder.require("index_head_dim")
    indexer: list[Weight] = [
        builder.linear(f"{name}.wq_b", builder.require("q_lora_rank"), [heads * width]),
        builder.linear(f"{name}.wk_weights_proj", builder.hidden_size, [width, heads], plain=True),
        builder.vector(f"{name}.k_norm", 2 * width, element_bytes=4),
    ]
    layer = _latent_layer(builder, index, indexer, chosen_tokens=chosen)
    assert layer.cache is not None
    index_bytes = width + width // _INDEX_SCALE_BLOCK * 4
    return replace(layer, cache=replace(layer.cache, index_bytes=index_bytes, index_flops=2 * heads * width))


def _has_indexer(builder: LayerBuilder, index: int) -> bool:
    """Return whether a layer has an indexer, or takes the tokens of the layer before: `skip_topk` in vLLM."""
    kinds, pattern = builder.get("indexer_types"), builder.get("index_topk_pattern")
    frequency, offset = builder.get("index_topk_freq", 1), builder.get("index_skip_topk_offset", 2)
    found = pattern[index] != "S" if pattern else max(index - offset + 1, 0) % frequency == 0
    if kinds and (kinds[index] == "full") != found:
        raise InvalidRequestError(f"The config's indexer_types and index_topk_freq do not agree about layer {index}.")
    return bool(found)


def _latent_layer(builder: LayerBuilder, index: int, indexer: list[Weight], *, chosen_tokens: int = 0) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    weights = block(
        latent_attention(builder, f"{prefix}.self_attn"),
        indexer,
        deepseek_half(builder, index, f"{prefix}.mlp"),
        builder.norms(*_TWO_NORMS),
    )
    cache = replace(latent_cache(builder), chosen_tokens=chosen_tokens)
    return DecoderLayer(block=weights, cache=cache, derived=latent_derived(builder, weights.weights))


def latent_cache(builder: LayerBuilder) -> LayerCache:
    """Return the cache of one vector, latent and rotary part, for all heads."""
    return LayerCache(
        kind="mla", kv_heads=1, head_dim=builder.require("kv_lora_rank") + builder.require("qk_rope_head_dim")
    )


def latent_derived(builder: LayerBuilder, weights: Sequence[Weight]) -> Block:
    """Return the weights that vLLM derives from the expanding matrix when it loads it: none from one in 16 bit, whose
    parts it uses where they are (`split_kv_b_proj` in layers/attention/mla_attention.py)."""
    linears = (one for one in weights if isinstance(one, Linear))
    if any(one.name.endswith("kv_b_proj") and one.scheme.weight_bits == 16 for one in linears):
        return Block()
    per_head = Part(builder.heads, builder.require("qk_nope_head_dim") + builder.require("v_head_dim"))
    return block(
        [builder.linear("absorbed_kv_b_proj", builder.require("kv_lora_rank"), [per_head], "column", plain=True)]
    )
