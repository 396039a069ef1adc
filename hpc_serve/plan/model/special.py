"""Families that need code: one function for one layer of each. ordinary.py has the others.

Falcon runs attention and MLP in parallel. Nemotron's layers lack parts, Llama 4 attends within chunks. Of families that
have an ordinary layer and say so in fields of their own, it has the functions that write the usual fields.
"""

from __future__ import annotations

from collections.abc import Callable

from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Vocabulary, Weight

_SWA_HEADS_FACTOR = 2
"""KV heads of MiMo-V2's layers with a window, where a config does not have their number: transformers' default."""


def falcon(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Falcon: no gate.

    Attention and MLP run in parallel after one norm with bias, or each after its own norm.
    """
    builder = builder.named("transformer.h")
    bias = builder.flag("bias")
    size = builder.intermediate_size or 4 * builder.hidden_size
    own_norms = 2 if builder.get("new_decoder_architecture", False) else 1
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    if builder.get("parallel_attn", True):
        norms = ("ln_attn", "ln_mlp")[: builder.get("num_ln_in_parallel_attn", own_norms)]
    return decoder_layer(
        builder.cache(),
        builder.attention("self_attention", bias=bias, output_bias=bias),
        builder.mlp("mlp", size, bias=bias, gated=False),
        builder.norms(*norms, *(f"{norm}.bias" for norm in norms)),
    )


def falcon_fields(config: CheckedConfig) -> None:
    """Write Falcon's KV heads where all families have them. Only its new decoder reads `num_kv_heads`."""
    if not config.get("new_decoder_architecture", False):
        config.pop("num_kv_heads", None)
        config["num_key_value_heads"] = 1 if config.get("multi_query", True) else config["num_attention_heads"]
    else:
        config.get("multi_query")


def nemotron_nas(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Nemotron from architecture search.

    Each layer has its own KV heads and MLP size, or lacks one of the two.
    """
    config = builder.of_layer("block_configs", is_needed=True)
    attention = config.get("attention", CheckedConfig({}, path=f"{config.path}attention."))
    feed_forward = config.get("ffn", CheckedConfig({}, path=f"{config.path}ffn."))
    weights, cache = [], None
    if not attention.get("no_op") and not attention.get("replace_with_linear"):
        builder = builder.with_heads(kv_heads=builder.heads // attention["n_heads_in_group"])
        bias = builder.flag("attention_bias")
        weights += builder.attention("self_attn", bias=bias, output_bias=bias)
        weights += builder.norms("input_layernorm")
        cache = builder.cache()
    if not feed_forward.get("no_op") and not feed_forward.get("replace_with_linear"):
        exact = int(2 * feed_forward["ffn_mult"] * builder.hidden_size / 3)
        weights += builder.mlp("mlp", -(-exact // 256) * 256)
        weights += builder.norms("post_attention_layernorm")
    return decoder_layer(cache, weights)


def llama4(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Llama 4.

    Every `interleave_moe_layer_step`-th layer has experts. Three of four layers attend within chunks.
    """
    bias = builder.flag("attention_bias")
    step, sparse = builder.get("interleave_moe_layer_step", 1), builder.get("moe_layers")
    has_experts = bool(step) and (builder.index + 1) % step == 0
    if sparse is not None and (builder.index in sparse) != has_experts:
        raise builder.disagreement("moe_layers and interleave_moe_layer_step")
    if has_experts:
        count, size = builder.require("num_local_experts"), builder.intermediate_size
        half = builder.router("feed_forward", count) + builder.experts("feed_forward.experts", count, size)
        half += builder.mlp("feed_forward.shared_expert", size)
    else:
        half = builder.mlp("feed_forward", builder.require("intermediate_size_mlp"))
    attention = builder.attention("self_attn", bias=bias, output_bias=bias)
    chunk, has_rope = builder.get("attention_chunk_size", 0), builder.of_layer("no_rope_layers")
    interval, kind = builder.get("no_rope_layer_interval", 4), builder.of_layer("layer_types")
    has_chunks = bool(chunk) and bool((builder.index + 1) % interval if has_rope is None else has_rope)
    if chunk and kind and (kind == "chunked_attention") != has_chunks:
        raise builder.disagreement("layer_types and no_rope_layers")
    cache = builder.cache(chunk, "chunked") if has_chunks else builder.cache()
    return decoder_layer(cache, attention, half, builder.two_norms())


def mimo_v2_fields(config: CheckedConfig) -> None:
    """Write MiMo-V2's layers with a window as all families have them, and the KV heads of these layers."""
    if pattern := config.get("hybrid_layer_pattern"):
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    config.setdefault("swa_num_key_value_heads", _SWA_HEADS_FACTOR * heads)
    _require_window(config)


def step3p5_fields(config: CheckedConfig) -> None:
    """Write Step 3.5's heads of layers with a window, and the layers that have experts, where others have them."""
    if other := config.get("attention_other_setting"):
        config["swa_num_attention_heads"] = other["num_attention_heads"]
        config.setdefault("swa_num_key_value_heads", other["num_attention_groups"])
        config.setdefault("swa_head_dim", other["head_dim"])
    if named := config.get("moe_layers_enum"):
        sparse = {int(one) for one in named.split(",")}
        _write_sparse(config, sparse.__contains__)
    config["share_expert_dim"]  # without it the shared expert's size is unknown
    _require_window(config)


def _require_window(config: CheckedConfig) -> None:
    """Raise InvalidRequestError where a layer has a window and no field says how long it is."""
    if "sliding_attention" in config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"]):
        config["sliding_window"]  # without it the cache is unknown


def ernie4_5_moe_fields(config: CheckedConfig) -> None:
    """Write which layers of ERNIE 4.5 have experts: from a first layer to a last one, every so many layers."""
    first, last = config.get("moe_layer_start_index", 0), config.get("moe_layer_end_index", -1)
    first = min(first) if isinstance(first, list) else first
    last = config["num_hidden_layers"] if last == -1 else last
    interval = config.get("moe_layer_interval", 1)
    _write_sparse(config, lambda index: first <= index <= last and (index + 1) % interval == 0)


def _write_sparse(config: CheckedConfig, is_sparse: Callable[[int], bool]) -> None:
    """Write the kind of each layer's second half, unless the config has it."""
    layers = range(config["num_hidden_layers"])
    config.setdefault("mlp_layer_types", ["sparse" if is_sparse(index) else "dense" for index in layers])


def head_bias(builder: LayerBuilder) -> list[Weight]:
    """Return the bias of Phi-3.5-MoE's output head, which ranks divide with the head."""
    return [Vocabulary(name="lm_head.bias", rows=builder.vocab_size, width=1)]
