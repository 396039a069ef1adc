"""Hybrids: layers whose memory of the past is a state of fixed size beside layers with ordinary attention.

Qwen3-Next and Qwen 3.5 (gated delta net) and Nemotron-H (Mamba 2).
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.layers import Reader, block
from hpc_serve.plan.model.moe import qwen_moe_half
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight


def qwen3_next(reader: Reader, index: int) -> DecoderLayer:
    """Qwen3-Next: every fourth layer attends, with a gate on its output; the others are gated delta nets."""
    return _qwen_hybrid(reader, index, f"model.layers.{index}", ("in_proj_qkvz", "in_proj_ba"))


def qwen3_5(reader: Reader, index: int) -> DecoderLayer:
    """Qwen 3.5 to 3.8, dense or with experts: the same layers, stored in smaller pieces."""
    return _qwen_hybrid(reader, index, f"model.language_model.layers.{index}", ("in_proj_qkv", "in_proj_b"))


def _qwen_hybrid(reader: Reader, index: int, prefix: str, names: tuple[str, str]) -> DecoderLayer:
    kinds = reader.get("layer_types")
    interval = reader.get("full_attention_interval", 4)
    attends = kinds[index] == "full_attention" if kinds else (index + 1) % interval == 0
    if attends:
        mixer = reader.attention(f"{prefix}.self_attn", bias=bool(reader.get("qkv_bias", False)), gated=True)
        mixer += reader.query_key_norms(f"{prefix}.self_attn")
        cache = reader.cache()
    else:
        mixer, cache = _gated_delta_net(reader, f"{prefix}.linear_attn", names)
    weights = block(
        mixer, qwen_moe_half(reader, index, prefix), reader.norms("input_layernorm", "post_attention_layernorm")
    )
    return DecoderLayer(block=weights, cache=cache)


def _gated_delta_net(reader: Reader, prefix: str, names: tuple[str, str]) -> tuple[list[Weight], LayerCache]:
    key_heads, key_dim = reader.need("linear_num_key_heads"), reader.need("linear_key_head_dim")
    value_heads, value_dim = reader.need("linear_num_value_heads"), reader.need("linear_value_head_dim")
    kernel = reader.get("linear_conv_kernel_dim", 4)
    keys, values = Part(key_heads, key_dim), Part(value_heads, value_dim)
    convolved = 2 * keys.size + values.size
    weights: list[Weight] = [
        reader.linear(f"{prefix}.{names[0]}", reader.hidden_size, [keys, keys, values, values], "column"),
        reader.linear(f"{prefix}.{names[1]}", reader.hidden_size, [value_heads, value_heads], "column"),
        reader.vector(f"{prefix}.conv1d", convolved * kernel, split=True),
        reader.vector(f"{prefix}.dt_bias", value_heads, split=True),
        reader.vector(f"{prefix}.A_log", value_heads, split=True, element_bytes=4),
        reader.vector(f"{prefix}.norm", value_dim),
        reader.linear(f"{prefix}.out_proj", values, [reader.hidden_size], "row"),
    ]
    state = ((convolved * (kernel - 1), 0), (value_heads * value_dim * key_dim, _state_bytes(reader)))
    return weights, LayerCache(kind="state", state=state)


def nemotron_h(reader: Reader, index: int) -> DecoderLayer:
    """Nemotron-H: a letter per layer says Mamba (M), attention (*), MLP (-) or experts (E)."""
    prefix = f"backbone.layers.{index}.mixer"
    kind = reader.need("hybrid_override_pattern")[index]
    cache = None
    if kind == "M":
        mixer, cache = _mamba2(reader, prefix)
    elif kind == "*":
        mixer, cache = reader.attention(prefix), reader.cache()
    elif kind == "-":
        mixer = reader.mlp(prefix, reader.intermediate_size, gated=False)
    elif kind == "E":
        mixer = _squared_relu_experts(reader, prefix)
    else:
        raise InvalidRequestError(f"hybrid_override_pattern has the letter {kind!r}; M, *, - and E are known.")
    return DecoderLayer(block=block(mixer, reader.norms("norm")), cache=cache)


def _mamba2(reader: Reader, prefix: str) -> tuple[list[Weight], LayerCache]:
    heads, head_dim = reader.need("mamba_num_heads"), reader.need("mamba_head_dim")
    groups, state_size = reader.need("n_groups"), reader.need("ssm_state_size")
    kernel = reader.get("conv_kernel", 4)
    inner, group = Part(heads, head_dim), Part(groups, state_size, replicate=True)
    convolved = inner.size + 2 * group.size
    bias = bool(reader.get("use_bias", False))
    conv_bias = 1 if reader.get("use_conv_bias", True) else 0
    weights: list[Weight] = [
        reader.linear(
            f"{prefix}.in_proj", reader.hidden_size, [inner, inner, group, group, heads], "column", bias=bias
        ),
        reader.vector(f"{prefix}.conv1d", convolved * (kernel + conv_bias), split=True),
        reader.vector(f"{prefix}.A_log", heads, split=True, element_bytes=4),
        reader.vector(f"{prefix}.D", heads, split=True),
        reader.vector(f"{prefix}.dt_bias", heads, split=True),
        reader.vector(f"{prefix}.norm", inner.size, split=True),
        reader.linear(f"{prefix}.out_proj", inner, [reader.hidden_size], "row", bias=bias),
    ]
    state = ((convolved * (kernel - 1), 0), (heads * head_dim * state_size, _state_bytes(reader)))
    return weights, LayerCache(kind="state", state=state)


def _squared_relu_experts(reader: Reader, prefix: str) -> list[Weight]:
    count, size = reader.need("n_routed_experts"), reader.need("moe_intermediate_size")
    shared = reader.get("moe_shared_expert_intermediate_size", 0) * reader.get("n_shared_experts", 1)
    weights = reader.router(prefix, count, correction=True)
    weights += reader.experts(prefix, count, size, gated=False)
    return weights + (reader.mlp(f"{prefix}.shared_experts", shared, gated=False) if shared else [])


def _state_bytes(reader: Reader) -> int:
    """Bytes an element of the recurrent state has; 0: the model's type."""
    name = reader.get("mamba_ssm_cache_dtype", reader.get("mamba_ssm_dtype"))
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(name), 0)
