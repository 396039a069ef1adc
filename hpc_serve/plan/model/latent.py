"""Decoders that cache less than keys and values of all heads, or attend to chosen tokens only.

- Blocks of tokens, or tokens that were compressed: DeepSeek V4 (vLLM's models/deepseek_v4) and MiniMax-M3
  (models/minimax_m3).
- Latent attention, with one vector for all heads: DeepSeek V2 to V3.2 and their kin (model_executor/models/
  deepseek_v2.py, models/deepseek_v32).
- Kimi Linear and Kimi K3: delta attention with a state of fixed size in most layers, latent attention in the others
  (models/kimi_k3: nvidia/model.py, kda.py, mla.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import (
    LayerBuilder,
    decoder_layer,
    deepseek_feed_forward,
    experts_or_dense,
    has_experts,
)
from hpc_serve.plan.model.ordinary import ordinary_layer
from hpc_serve.plan.model.spec import CacheTensor, DecoderLayer, LayerCache, Part, Weight

_INDEX_BLOCK = 128
"""Elements of an indexer's key that share a scale of 32 bit."""

# -- compressed tokens, and blocks of tokens

_ENTRY_SCALE_BYTES = 8
"""Scales of an entry of DeepSeek V4's cache, whose rotary part is in 16 bit and whose rest is in fp8."""
_ALIGN = 576
_KV_BLOCK, _WINDOW_BLOCK = 256, 64
_STATE_BLOCKS = {4: 4, 128: 8}
"""Bytes to which pages are rounded, and tokens of a block: of compressed entries, of the window, and of what waits to
be compressed, by how many tokens become one (`CompressorStateCache` in compressor.py)."""


def deepseek_v4(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of DeepSeek V4.

    It has a window of single tokens, and in most layers entries of 4 or 128 tokens. Entries of 4 tokens come with an
    indexer.
    """
    builder = builder.named("layers")
    ratio = max(1, builder.of_layer("compress_ratios", is_needed=True))
    if ratio not in (1, *_STATE_BLOCKS):
        raise InvalidRequestError(
            f"The config's compress_ratios has {ratio} for layer {builder.index}: use 0, 1, 4 or 128."
        )
    hidden, copies = builder.hidden_size, builder.require("hc_mult")
    mixing = (2 + copies) * copies * (copies * hidden + 1) + 3
    return decoder_layer(
        _v4_cache(builder, ratio),
        _v4_attention(builder, ratio),
        _v4_experts(builder),
        builder.norms("attn_norm", "ffn_norm"),
        [builder.vector("hyper_connections", 2 * mixing, element_bytes=4)],
    )


def _v4_attention(builder: LayerBuilder, ratio: int) -> list[Weight]:
    """Return the weights of attention with keys that are values too, for all heads.

    Each group of heads has an output projection of low rank.
    """
    rank, width, groups = builder.require("q_lora_rank"), builder.head_dim, builder.require("o_groups")
    middle = Part(groups, builder.require("o_lora_rank"))
    weights: list[Weight] = [
        builder.vector("attn.attn_sink", builder.heads, split=True, element_bytes=4),
        builder.linear("attn.wq_a", builder.hidden_size, [rank, width]),
        builder.vector("attn.q_norm", rank),
        builder.linear("attn.wq_b", rank, [Part(builder.heads, width)], "column"),
        builder.vector("attn.kv_norm", width),
        builder.linear("attn.wo_a", builder.heads * width // groups, [middle], "column"),
        builder.linear("attn.wo_b", middle, [builder.hidden_size], "row"),
    ]
    if ratio > 1:
        weights += _compressor(builder, "attn.compressor", ratio, width)
    if ratio == 4:
        heads, index_width = builder.require("index_n_heads"), builder.require("index_head_dim")
        weights += [
            builder.linear("attn.indexer.wq_b", rank, [heads * index_width]),
            builder.linear("attn.indexer.weights_proj", builder.hidden_size, [heads], plain=True),
            *_compressor(builder, "attn.indexer.compressor", ratio, index_width),
        ]
    return weights


def _compressor(builder: LayerBuilder, prefix: str, ratio: int, width: int) -> list[Weight]:
    """Return the weights that make one entry of `ratio` tokens. For 4 the entries overlap, and have two halves."""
    wide = _halves(ratio) * width
    return [
        builder.vector(f"{prefix}.ape", ratio * wide, element_bytes=4),
        builder.linear(f"{prefix}.wkv_wgate", builder.hidden_size, [wide, wide], plain=True),
        builder.vector(f"{prefix}.norm", width),
    ]


def _halves(ratio: int) -> int:
    return 2 if ratio == 4 else 1


def _v4_experts(builder: LayerBuilder) -> list[Weight]:
    """Return the experts. In the first layers a table of tokens chooses them."""
    by_table = builder.index < builder.require("num_hash_layers")
    weights = experts_or_dense(
        builder,
        "ffn",
        count="n_routed_experts",
        correction=False if by_table else ("topk_method", "noaux_tc", None),
        shared_count="n_shared_experts",
    )
    if by_table:
        chosen = builder.require("num_experts_per_tok")
        weights.append(builder.vector("ffn.gate.tid2eid", builder.vocab_size * chosen, element_bytes=4))
    return weights


def _v4_cache(builder: LayerBuilder, ratio: int) -> LayerCache:
    width, rotary = builder.head_dim, builder.require("qk_rope_head_dim")
    entry = width + rotary + _ENTRY_SCALE_BYTES
    window = builder.require("sliding_window")
    compressed = partial(CacheTensor, block_tokens=_KV_BLOCK, tokens_per_entry=ratio, align=_ALIGN)
    single = CacheTensor(
        name="window", block_tokens=_WINDOW_BLOCK, entry_bytes=entry, window=window, align=_ALIGN, is_attended=True
    )
    entries = compressed(name="entries", entry_bytes=entry, is_attended=True)
    tensors = [single] if ratio == 1 else [entries, single, _waiting("waiting", ratio, width)]
    cache = LayerCache(kind="compressed", head_dim=width, tensors=tuple(tensors))
    if ratio != 4:
        return cache
    heads, index_width = builder.require("index_n_heads"), builder.require("index_head_dim")
    key_bytes = index_width + index_width // _INDEX_BLOCK * 4
    index = compressed(name="index", entry_bytes=key_bytes), _waiting("index_waiting", ratio, index_width)
    return replace(
        cache,
        index_bytes=key_bytes // ratio,
        index_flops=2 * heads * index_width // ratio,
        chosen_tokens=ratio * builder.require("index_topk"),
        tensors=(*tensors, *index),
    )


def _waiting(name: str, ratio: int, width: int) -> CacheTensor:
    """Return the cache for keys and scores, in 32 bit, of tokens that are not compressed yet."""
    halves = _halves(ratio)
    return CacheTensor(
        name=name,
        block_tokens=_STATE_BLOCKS[ratio],
        entry_bytes=2 * halves * width * 4,
        window=halves * ratio,
        align=_ALIGN,
    )


def deepseek_v4_beside(builder: LayerBuilder) -> list[Weight]:
    """Return the weights that join the copies of the hidden state before the output head, on every stage."""
    copies = builder.require("hc_mult")
    return [builder.vector("hc_head", copies * (copies * builder.hidden_size + 1) + 1, element_bytes=4)]


def deepseek_v4_fields(config: CheckedConfig) -> None:
    """Tell the quantization of what type the experts are, which this config has elsewhere (vLLM's quant_config.py)."""
    kind = config.get("expert_dtype", "fp4")
    if kind not in ("fp4", "fp8"):
        raise InvalidRequestError(f"The config's expert_dtype is {str(kind)[:40]!r}: use fp4 or fp8.")
    declared = config.get("quantization_config")
    if declared and config.get("model_type") == "deepseek_v4":
        declared.setdefault("expert_dtype", kind)


def minimax_m3(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of MiniMax-M3.

    It has norms over the queries and keys of each head, and an indexer that chooses blocks of tokens.
    """
    sparse = builder.get("sparse_attention_config") or {}
    chooses = bool(sparse.get("use_sparse_attention")) and builder.of_layer("sparse_attention_freq", inside=sparse) != 0
    cache = builder.cache()
    attention = builder.attention("self_attn") + builder.query_key_norms()
    if chooses:
        if builder.of_layer("sparse_disable_index_value", inside=sparse) == 0:
            raise InvalidRequestError(
                f"The config's sparse_disable_index_value is 0 for layer {builder.index}: vLLM has no values in its "
                "indexer."
            )
        heads, width = sparse["sparse_num_index_heads"], sparse["sparse_index_dim"]
        parts = [Part(heads, width, replicate=True), Part(1, width, replicate=True)]
        attention += [
            builder.linear("self_attn.index_q_proj", builder.hidden_size, parts, "column"),
            builder.vector("self_attn.index_norms", 2 * width),
        ]
        cache = replace(
            cache,
            index_bytes=width * builder.dtype_bytes,
            index_flops=2 * heads * width,
            chosen_tokens=sparse["sparse_topk_blocks"] * sparse["sparse_block_size"],
        )
    return decoder_layer(cache, attention, _m3_feed_forward(builder), builder.two_norms())


def _m3_feed_forward(builder: LayerBuilder) -> list[Weight]:
    if not has_experts(builder):
        return builder.mlp("mlp", builder.require("dense_intermediate_size"))
    return experts_or_dense(
        builder,
        "block_sparse_moe",
        count="num_local_experts",
        size="intermediate_size",
        size_alias="moe_intermediate_size",
        correction=("use_routing_bias", True, False),
        wide_router=True,
        shared_count="n_shared_experts",
    )


# -- latent attention


def _latent_attention(builder: LayerBuilder, *, gated: bool = False) -> tuple[LayerCache, list[Weight], list[Weight]]:
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
    cache, attention, derived = _latent_attention(builder)
    cache, feed_forward = replace(cache, chosen_tokens=chosen_tokens), deepseek_feed_forward(builder, "mlp")
    return decoder_layer(cache, attention, indexer, feed_forward, builder.two_norms(), derived=derived)


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
    index_bytes = width + width // _INDEX_BLOCK * 4
    return replace(layer, cache=replace(layer.cache, index_bytes=index_bytes, index_flops=2 * heads * width))


def _has_indexer(builder: LayerBuilder) -> bool:
    """Return whether a layer has an indexer, or takes the tokens of the layer before: `skip_topk` in vLLM."""
    kind, letter = builder.of_layer("indexer_types"), builder.of_layer("index_topk_pattern")
    frequency, offset = builder.get("index_topk_freq", 1), builder.get("index_skip_topk_offset", 2)
    found: bool = letter != "S" if letter else max(builder.index - offset + 1, 0) % frequency == 0
    if kind and (kind == "full") != found:
        raise builder.disagreement("indexer_types and index_topk_freq")
    return found


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
        return decoder_layer(*_delta_attention(builder), _kimi_feed_forward(builder), norms)
    cache, mixer, derived = _latent_attention(builder, gated=builder.flag("mla_use_output_gate"))
    return decoder_layer(cache, mixer, _kimi_feed_forward(builder), norms, derived=derived)


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


def _kimi_feed_forward(builder: LayerBuilder) -> list[Weight]:
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
