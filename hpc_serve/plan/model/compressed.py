"""Decoders that attend to blocks of tokens, or to tokens that were compressed: DeepSeek V4 and MiniMax-M3.

Sources: vLLM's models/deepseek_v4 and models/minimax_m3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.moe import experts_or_dense, has_experts
from hpc_serve.plan.model.spec import CacheTensor, DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight

_ENTRY_SCALE_BYTES = 8
"""Scales of an entry of DeepSeek V4's cache, whose rotary part is in 16 bit and whose rest is in fp8."""
_INDEX_BLOCK = 128
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
    return decoder_layer(cache, attention, _m3_half(builder), builder.two_norms())


def _m3_half(builder: LayerBuilder) -> list[Weight]:
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
