"""Mixtures of experts: one function for one layer of each family. Those with latent attention are in latent.py.

Routers are never quantised, as in vLLM.
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.dense import window_cache
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.scheme import FP32
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Weight

_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def mixtral(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Mixtral: eight experts in every layer."""
    prefix = f"model.layers.{index}"
    count = builder.require("num_local_experts")
    weights = block(
        builder.attention(f"{prefix}.self_attn"),
        builder.router(f"{prefix}.block_sparse_moe", count),
        builder.experts(f"{prefix}.block_sparse_moe", count, builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def qwen_moe_half(builder: LayerBuilder, index: int, prefix: str) -> list[Weight]:
    """The MLP of a Qwen layer: dense, or routed experts with or without a shared expert."""
    count = builder.either("num_experts", "num_local_experts", 0)
    is_sparse = (index + 1) % builder.get("decoder_sparse_step", 1) == 0
    if not count or not is_sparse or index in builder.get("mlp_only_layers", ()):
        return builder.mlp(f"{prefix}.mlp", builder.intermediate_size)
    shared = builder.get("shared_expert_intermediate_size", 0)
    weights = builder.router(f"{prefix}.mlp", count)
    weights += builder.experts(f"{prefix}.mlp", count, builder.require("moe_intermediate_size"))
    if shared:
        weights += builder.mlp(f"{prefix}.mlp.shared_expert", shared)
        weights.append(builder.linear(f"{prefix}.mlp.shared_expert_gate", builder.hidden_size, [1], plain=True))
    return weights


def qwen2_moe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Qwen 1.5 and 2 with experts."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("qkv_bias", True))),
        qwen_moe_half(builder, index, prefix),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def qwen3_moe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Qwen 3 with experts."""
    prefix = f"model.layers.{index}"
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.query_key_norms(f"{prefix}.self_attn"),
        qwen_moe_half(builder, index, prefix),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index))


def olmoe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """OLMoE: experts in every layer, one norm over all queries and one over all keys."""
    prefix = f"model.layers.{index}"
    count = builder.require("num_experts")
    weights = block(
        builder.attention(f"{prefix}.self_attn"),
        [
            builder.vector(f"{prefix}.self_attn.q_norm", builder.heads * builder.head_dim),
            builder.vector(f"{prefix}.self_attn.k_norm", builder.kv_heads * builder.head_dim),
        ],
        builder.router(f"{prefix}.mlp", count),
        builder.experts(f"{prefix}.mlp", count, builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def minimax_m2(builder: LayerBuilder, index: int) -> DecoderLayer:
    """MiniMax-M2: experts in every layer, routers in 32 bit, norms over all queries and all keys of a rank."""
    prefix = f"model.layers.{index}"
    count = builder.require("num_local_experts")
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        [
            builder.vector(f"{prefix}.self_attn.q_norm", builder.heads * builder.head_dim, split=True),
            builder.vector(f"{prefix}.self_attn.k_norm", builder.kv_heads * builder.head_dim, split=True),
        ],
        builder.router(
            f"{prefix}.block_sparse_moe", count, correction=bool(builder.get("use_routing_bias", False)), scheme=FP32
        ),
        builder.experts(f"{prefix}.block_sparse_moe", count, builder.intermediate_size),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def deepseek_v1(builder: LayerBuilder, index: int) -> DecoderLayer:
    """DeepSeek-MoE-16B, the first: its experts are those of V2, its attention is Llama's."""
    prefix = f"model.layers.{index}"
    bias = bool(builder.get("attention_bias", False))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        deepseek_half(builder, index, f"{prefix}.mlp"),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def has_experts(builder: LayerBuilder, index: int) -> bool:
    """Whether a layer has experts, by `mlp_layer_types` or by the number of dense layers at the beginning.

    `moe_layer_freq` is a number (every so many layers) or has a 0 or a 1 for each layer.
    """
    kinds, frequency = builder.get("mlp_layer_types"), builder.get("moe_layer_freq", 1)
    first = builder.get("first_k_dense_replace")
    if isinstance(frequency, (list, tuple)):
        if index >= len(frequency):
            raise InvalidRequestError(
                f"The config's moe_layer_freq names {len(frequency)} of {builder.num_layers} layers."
            )
        each = frequency[index] == 1
    else:
        each = index % frequency == 0
    if kinds:
        if first is not None and (kinds[index] == "sparse") != (index >= first and each):
            raise InvalidRequestError(
                "The config's first_k_dense_replace, moe_layer_freq and mlp_layer_types do not agree about layer "
                f"{index}."
            )
        return bool(kinds[index] == "sparse")
    return bool(index >= (first or 0) and each)


def deepseek_half(builder: LayerBuilder, index: int, prefix: str) -> list[Weight]:
    """The MLP of a DeepSeek layer: dense, or routed experts and shared ones."""
    count = builder.either("n_routed_experts", "num_experts", 0)
    if count and has_experts(builder, index):
        size = builder.require("moe_intermediate_size")
        half = builder.router(prefix, count, correction=builder.get("topk_method") == "noaux_tc")
        half += builder.experts(prefix, count, size)
        shared = builder.get("n_shared_experts", 0)
        return half + (builder.mlp(f"{prefix}.shared_experts", size * shared) if shared else [])
    return builder.mlp(prefix, builder.intermediate_size)


def glm4_moe(builder: LayerBuilder, index: int) -> DecoderLayer:
    """GLM-4.5 and 4.6: routers in 32 bit."""
    prefix = f"model.layers.{index}"
    if index >= builder.get("first_k_dense_replace", 0):
        count, size = builder.require("n_routed_experts"), builder.require("moe_intermediate_size")
        shared = builder.get("n_shared_experts", 0)
        half = builder.router(f"{prefix}.mlp", count, correction=True, scheme=FP32)
        half += builder.experts(f"{prefix}.mlp", count, size)
        half += builder.mlp(f"{prefix}.mlp.shared_experts", size * shared) if shared else []
    else:
        half = builder.mlp(f"{prefix}.mlp", builder.intermediate_size)
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.query_key_norms(f"{prefix}.self_attn") if builder.get("use_qk_norm", False) else [],
        half,
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def gpt_oss(builder: LayerBuilder, index: int) -> DecoderLayer:
    """gpt-oss: biases everywhere, a sink per head, a sliding window in every second layer."""
    prefix = f"model.layers.{index}"
    count = builder.require("num_local_experts")
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=True, output_bias=True),
        [builder.vector(f"{prefix}.self_attn.sinks", builder.heads, split=True)],
        builder.router(f"{prefix}.mlp", count, bias=True),
        builder.experts(f"{prefix}.mlp", count, builder.intermediate_size, bias=True),
        builder.norms(*_TWO_NORMS),
    )
    return DecoderLayer(block=weights, cache=window_cache(builder, index, pattern=2))


def llama4(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Llama 4: experts in every `interleave_moe_layer_step`-th layer. Three of four layers attend within chunks."""
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
