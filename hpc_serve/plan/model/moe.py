"""Mixtures of experts: Mixtral, Qwen, DeepSeek (with its latent attention), GLM, gpt-oss, Llama 4.

Routers stay in 16 bit whatever the quantisation, as in vLLM.
"""

from __future__ import annotations

from hpc_serve.plan.model.dense import window_cache
from hpc_serve.plan.model.layers import Reader, block
from hpc_serve.plan.model.quantization import FP32
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def mixtral(reader: Reader, index: int) -> DecoderLayer:
    """Mixtral: eight experts in every layer."""
    prefix = f"model.layers.{index}"
    count = reader.need("num_local_experts")
    weights = block(
        reader.attention(f"{prefix}.self_attn"),
        reader.router(f"{prefix}.block_sparse_moe", count),
        reader.experts(f"{prefix}.block_sparse_moe", count, reader.intermediate_size),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(reader, index))


def qwen_moe_half(reader: Reader, index: int, prefix: str) -> list[Weight]:
    """The MLP half of a Qwen layer: dense, or experts with or without a shared one."""
    count = reader.get("num_experts", 0)
    is_sparse = (index + 1) % reader.get("decoder_sparse_step", 1) == 0
    if not count or not is_sparse or index in reader.get("mlp_only_layers", ()):
        return reader.mlp(f"{prefix}.mlp", reader.intermediate_size)
    shared = reader.get("shared_expert_intermediate_size", 0)
    weights = reader.router(f"{prefix}.mlp", count)
    weights += reader.experts(f"{prefix}.mlp", count, reader.need("moe_intermediate_size"))
    if shared:
        weights += reader.mlp(f"{prefix}.mlp.shared_expert", shared)
        weights.append(reader.linear(f"{prefix}.mlp.shared_expert_gate", reader.hidden_size, [1], plain=True))
    return weights


def qwen2_moe(reader: Reader, index: int) -> DecoderLayer:
    """Qwen 1.5 and 2 with experts."""
    prefix = f"model.layers.{index}"
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=bool(reader.get("qkv_bias", True))),
        qwen_moe_half(reader, index, prefix),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(reader, index))


def qwen3_moe(reader: Reader, index: int) -> DecoderLayer:
    """Qwen 3 with experts."""
    prefix = f"model.layers.{index}"
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=bool(reader.get("attention_bias", False))),
        reader.query_key_norms(f"{prefix}.self_attn"),
        qwen_moe_half(reader, index, prefix),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(reader, index))


def olmoe(reader: Reader, index: int) -> DecoderLayer:
    """OLMoE: small experts, norms over all queries and over all keys together."""
    prefix = f"model.layers.{index}"
    count = reader.need("num_experts")
    weights = block(
        reader.attention(f"{prefix}.self_attn"),
        [
            reader.vector(f"{prefix}.self_attn.q_norm", reader.heads * reader.head_dim),
            reader.vector(f"{prefix}.self_attn.k_norm", reader.kv_heads * reader.head_dim),
        ],
        reader.router(f"{prefix}.mlp", count),
        reader.experts(f"{prefix}.mlp", count, reader.intermediate_size),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=reader.cache())


def minimax_m2(reader: Reader, index: int) -> DecoderLayer:
    """MiniMax-M2: experts in every layer, routers in 32 bit, norms over all queries and over all keys of a rank."""
    prefix = f"model.layers.{index}"
    count = reader.need("num_local_experts")
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=bool(reader.get("attention_bias", False))),
        [
            reader.vector(f"{prefix}.self_attn.q_norm", reader.heads * reader.head_dim, split=True),
            reader.vector(f"{prefix}.self_attn.k_norm", reader.kv_heads * reader.head_dim, split=True),
        ],
        reader.router(
            f"{prefix}.block_sparse_moe", count, correction=bool(reader.get("use_routing_bias", False)), scheme=FP32
        ),
        reader.experts(f"{prefix}.block_sparse_moe", count, reader.intermediate_size),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=reader.cache())


def _latent_attention(reader: Reader, prefix: str) -> list[Weight]:
    """DeepSeek's: low-rank projections that each rank holds whole, per-head ones that are divided."""
    nope, rope = reader.need("qk_nope_head_dim"), reader.need("qk_rope_head_dim")
    value, latent = reader.need("v_head_dim"), reader.need("kv_lora_rank")
    query = Part(reader.heads, nope + rope)
    rank = reader.get("q_lora_rank")
    weights: list[Weight] = []
    if rank:
        first: list[Part | int] = [rank, latent + rope]
        weights += [
            reader.linear(f"{prefix}.kv_a_proj_with_mqa", reader.hidden_size, first),
            reader.vector(f"{prefix}.q_a_layernorm", rank),
            reader.linear(f"{prefix}.q_b_proj", rank, [query], "column"),
        ]
    else:
        weights += [
            reader.linear(f"{prefix}.kv_a_proj_with_mqa", reader.hidden_size, [latent + rope]),
            reader.linear(f"{prefix}.q_proj", reader.hidden_size, [query], "column"),
        ]
    return [
        *weights,
        reader.vector(f"{prefix}.kv_a_layernorm", latent),
        reader.linear(f"{prefix}.kv_b_proj", latent, [Part(reader.heads, nope + value)], "column"),
        reader.linear(f"{prefix}.o_proj", Part(reader.heads, value), [reader.hidden_size], "row"),
    ]


def deepseek(reader: Reader, index: int) -> DecoderLayer:
    """DeepSeek V2, V3, R1 and Kimi K2."""
    prefix = f"model.layers.{index}"
    count = reader.get("n_routed_experts", 0)
    is_sparse = index >= reader.get("first_k_dense_replace", 0) and index % reader.get("moe_layer_freq", 1) == 0
    if count and is_sparse:
        size = reader.need("moe_intermediate_size")
        half = reader.router(f"{prefix}.mlp", count, correction=reader.get("topk_method") == "noaux_tc")
        half += reader.experts(f"{prefix}.mlp", count, size)
        shared = reader.get("n_shared_experts", 0)
        half += reader.mlp(f"{prefix}.mlp.shared_experts", size * shared) if shared else []
    else:
        half = reader.mlp(f"{prefix}.mlp", reader.intermediate_size)
    weights = block(_latent_attention(reader, f"{prefix}.self_attn"), half, reader.norms(*_TWO_NORMS))
    latent, rope = reader.need("kv_lora_rank"), reader.need("qk_rope_head_dim")
    per_head = Part(reader.heads, reader.need("qk_nope_head_dim") + reader.need("v_head_dim"))
    absorbed = reader.linear("absorbed_kv_b_proj", latent, [per_head], "column", plain=True)
    cache = LayerCache(kind="mla", kv_heads=1, head_dim=latent + rope)
    return DecoderLayer(block=weights, cache=cache, derived=block([absorbed]))


def glm4_moe(reader: Reader, index: int) -> DecoderLayer:
    """GLM-4.5 and 4.6, whose routers are kept in 32 bit."""
    prefix = f"model.layers.{index}"
    if index >= reader.get("first_k_dense_replace", 0):
        count, size = reader.need("n_routed_experts"), reader.need("moe_intermediate_size")
        shared = reader.get("n_shared_experts", 0)
        half = reader.router(f"{prefix}.mlp", count, correction=True, scheme=FP32)
        half += reader.experts(f"{prefix}.mlp", count, size)
        half += reader.mlp(f"{prefix}.mlp.shared_experts", size * shared) if shared else []
    else:
        half = reader.mlp(f"{prefix}.mlp", reader.intermediate_size)
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=bool(reader.get("attention_bias", False))),
        reader.query_key_norms(f"{prefix}.self_attn") if reader.get("use_qk_norm", False) else [],
        half,
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=reader.cache())


def gpt_oss(reader: Reader, index: int) -> DecoderLayer:
    """gpt-oss: biases everywhere, a sink per head, every second layer behind a window of 128 tokens."""
    prefix = f"model.layers.{index}"
    count = reader.need("num_local_experts")
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=True, output_bias=True),
        [reader.vector(f"{prefix}.self_attn.sinks", reader.heads, split=True)],
        reader.router(f"{prefix}.mlp", count, bias=True),
        reader.experts(f"{prefix}.mlp", count, reader.intermediate_size, bias=True),
        reader.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(reader, index, pattern=2))


def llama4(reader: Reader, index: int) -> DecoderLayer:
    """Llama 4: experts in every `interleave_moe_layer_step`-th layer, three of four layers attend within chunks."""
    prefix = f"model.layers.{index}"
    bias = bool(reader.get("attention_bias", False))
    step = reader.get("interleave_moe_layer_step", 1)
    if step and (index + 1) % step == 0:
        count = reader.need("num_local_experts")
        half = reader.router(f"{prefix}.feed_forward", count)
        half += reader.experts(f"{prefix}.feed_forward", count, reader.intermediate_size)
        half += reader.mlp(f"{prefix}.feed_forward.shared_expert", reader.intermediate_size)
    else:
        half = reader.mlp(f"{prefix}.feed_forward", reader.need("intermediate_size_mlp"))
    weights = block(
        reader.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias), half, reader.norms(*_TWO_NORMS)
    )
    chunk = reader.get("attention_chunk_size", 0)
    has_chunks = bool(chunk) and (index + 1) % 4 != 0
    return DecoderLayer(block=weights, cache=reader.cache(chunk, "chunked") if has_chunks else reader.cache())
