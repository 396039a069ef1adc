"""Families that need code: one function for one layer of each. ordinary.py has the others.

EAGLE's draft heads read the hidden states of the model that they draft for. Gemma 4 has heads of two widths, values
that are keys, and layers that share a cache. Gemma 3n has four streams of hidden states (AltUp), a low-rank residual
(Laurel) and MLPs of several sizes (MatFormer). Falcon runs attention and MLP in parallel, Nemotron's layers lack parts,
Llama 4 attends within chunks. Families with an ordinary layer and fields of their own have functions that write the
usual fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig, missing
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer, Part, Vocabulary, Weight, round_up

# -- EAGLE: vLLM's model_executor/models/llama_eagle.py and llama_eagle3.py

_AUXILIARY_STATES = 3
"""Hidden states of inner layers that an EAGLE-3 head reads, where its config does not say how many."""


def eagle(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of the first EAGLE: Llama's layers. The first has no input norm and a matrix before it."""
    norms = ("post_attention_layernorm",) if builder.index == 0 else ("input_layernorm", "post_attention_layernorm")
    return _eagle_layer(builder, norms, joined=2 * builder.hidden_size)


def eagle3(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of EAGLE-3: the first layer's attention reads embedding and hidden state side by side."""
    hidden = builder.hidden_size
    joined = builder.get("num_aux_hidden_states", _AUXILIARY_STATES) * builder.get("target_hidden_size", hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return _eagle_layer(builder, norms, joined=joined, inputs=hidden if builder.index else 2 * hidden)


def _eagle_layer(
    builder: LayerBuilder, norms: tuple[str, ...], *, joined: int, inputs: int | None = None
) -> DecoderLayer:
    """Return Llama's layer with these norms. Before the first is a matrix of so many `joined` features."""
    outside = builder.outside
    before: list[Weight] = [outside.linear("model.fc", joined, [builder.hidden_size])]
    before += [outside.vector("model.fc_norm", joined)] if builder.flag("fc_norm") else []
    return decoder_layer(
        builder.cache(),
        builder.attention("self_attn", bias=builder.flag("attention_bias"), inputs=inputs),
        builder.mlp("mlp", builder.intermediate_size, bias=builder.flag("mlp_bias")),
        builder.norms(*norms),
        [] if builder.index else before,
    )


# -- Gemma 4

_GLOBAL_HEAD_DIM = 512
"""Width of the heads that attend to all tokens, where a config does not say: transformers' default."""


def gemma4(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Gemma 4. A layer that attends to all tokens has wider heads, and its values may be its keys.

    The last `num_kv_shared_layers` take keys and values from a layer before. Experts stand beside the MLP.
    """
    builder = builder.named("model.language_model.layers")
    attends_to_all = builder.of_layer("layer_types", is_needed=True) == "full_attention"
    is_shared = builder.index >= builder.num_layers - builder.get("num_kv_shared_layers", 0)
    equal = builder.flag("attention_k_eq_v")
    builder = _gemma4_heads(builder, attends_to_all=attends_to_all, equal=equal)
    attention, copied = _gemma4_attention(builder, is_shared=is_shared)
    has_one = attends_to_all and equal and not is_shared
    wide = is_shared and builder.flag("use_double_wide_mlp")
    window = 0 if attends_to_all else builder.require("sliding_window")
    cache = None if is_shared else builder.cache(window, "sliding" if window else "full")
    return decoder_layer(
        cache,
        [*attention, *([] if has_one else copied)],
        builder.mlp("mlp", builder.intermediate_size * (2 if wide else 1)),
        _gemma4_experts(builder),
        _per_layer_input(builder),
        [*builder.two_norms(), *builder.norms("pre_feedforward_layernorm", "post_feedforward_layernorm")],
        derived=copied if has_one else [],
    )


def _per_layer_input(builder: LayerBuilder) -> list[Weight]:
    """Return what a layer adds its own embedding with, if the model has such embeddings."""
    width = builder.get("hidden_size_per_layer_input", 0)
    if not width:
        return []
    return [
        builder.linear("per_layer_input_gate", builder.hidden_size, [width]),
        builder.linear("per_layer_projection", width, [builder.hidden_size]),
        *builder.norms("post_per_layer_input_norm"),
    ]


def gemma4_beside(builder: LayerBuilder) -> list[Weight]:
    """Return the weights beside the layers of Gemma 4's small models: an embedding of each token for each layer."""
    width = builder.get("hidden_size_per_layer_input", 0) * builder.num_layers
    rows = builder.get("vocab_size_per_layer_input", builder.vocab_size)
    if not width:
        return []
    plain = builder.quantization.plain
    return [
        Vocabulary(name="embed_tokens_per_layer", rows=rows, width=width, scheme=plain),
        builder.linear("model.per_layer_model_projection", builder.hidden_size, [width], "column"),
        builder.vector("model.per_layer_projection_norm", width // builder.num_layers),
    ]


def _gemma4_heads(builder: LayerBuilder, *, attends_to_all: bool, equal: bool) -> LayerBuilder:
    """Return the builder with the layer's heads, by the fields for full attention or transformers' for each layer."""
    each = builder.get("per_layer_config", {})
    if not isinstance(each, Mapping) or not all(isinstance(one, Mapping) for one in each.values()):
        raise InvalidRequestError("The config's per_layer_config must be an object of objects.")
    of: Mapping[str, int] = next(
        (one for key, one in each.items() if str(key).lstrip("0") == (str(builder.index).lstrip("0"))), {}
    )
    if not attends_to_all:
        width, kv_heads = builder.head_dim, builder.kv_heads
    else:
        width = builder.get("global_head_dim", of.get("head_dim", _GLOBAL_HEAD_DIM))
        kv_heads = builder.get("num_global_key_value_heads", of.get("num_key_value_heads"))
        kv_heads = kv_heads if equal and kv_heads else builder.kv_heads
    unknown = sorted(set(of) - {"head_dim", "num_key_value_heads"})
    if unknown or not all(type(value) is int and value > 0 for value in of.values()):
        raise InvalidRequestError(
            f"The config's per_layer_config has sizes of layer {builder.index} that are not known."
        )
    return builder.with_heads(head_dim=width, value_dim=width, kv_heads=kv_heads)


def _gemma4_attention(builder: LayerBuilder, *, is_shared: bool) -> tuple[list[Weight], list[Weight]]:
    """Return (weights of a layer's attention, the values' projection).

    vLLM holds the values' projection even if the values are the keys.
    """
    bias, hidden = builder.flag("attention_bias"), builder.hidden_size
    query, norm = Part(builder.heads, builder.head_dim), builder.vector("self_attn.q_norm", builder.head_dim)
    output = builder.linear("self_attn.o_proj", query, [hidden], "row", bias=bias)
    if is_shared:
        return [builder.linear("self_attn.q_proj", hidden, [query], "column", bias=bias), output, norm], []
    kv = Part(builder.kv_heads, builder.head_dim, replicate=True)
    fused = builder.linear("self_attn.q_proj", hidden, [query, kv], "column", bias=bias)
    values = builder.linear("self_attn.v_proj", hidden, [kv], "column", bias=bias)
    return [fused, output, norm, builder.vector("self_attn.k_norm", builder.head_dim)], [values]


def _gemma4_experts(builder: LayerBuilder) -> list[Weight]:
    count = builder.get("num_experts", 0)
    if not builder.get("enable_moe_block", bool(count)) or not count:
        return []
    size = builder.first("moe_intermediate_size", "expert_intermediate_size")
    if size is None:
        raise missing("moe_intermediate_size")
    return [
        *builder.router("router", count),
        builder.vector("router.per_expert_scale", count),
        *builder.experts("experts", count, size),
        *builder.norms("router.scale", "pre_feedforward_layernorm_2"),
        *builder.norms("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    ]


# -- Gemma 3n

_SIZES = "intermediate_size_by_layer"


def gemma3n_fields(config: CheckedConfig) -> None:
    """Write the sizes of all MLPs as one list, and the largest of them as `intermediate_size`."""
    sizes, layers = config["intermediate_size"], config["num_hidden_layers"]
    if isinstance(sizes, int):
        sizes = [sizes] * layers
    if len(sizes) != layers:
        raise InvalidRequestError(f"The config's intermediate_size names {len(sizes)} of its {layers} layers.")
    config[_SIZES], config["intermediate_size"] = sizes, max(sizes)


def gemma3n(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of Gemma 3n. A layer that takes keys and values from another has queries alone."""
    builder = builder.named("model.language_model.layers")
    hidden = builder.hidden_size
    streams, rank = builder.require("altup_num_inputs"), builder.require("laurel_rank")
    is_shared = builder.index >= builder.num_layers - builder.get("num_kv_shared_layers", 0)
    bias = builder.flag("attention_bias")
    altup: list[Weight] = [
        builder.linear("altup.correction_coefs", streams, [streams]),
        builder.linear("altup.prediction_coefs", streams, [streams**2]),
        builder.linear("altup.modality_router", hidden, [streams]),
        builder.vector("altup.correct_output_scale", hidden, element_bytes=4),
        *builder.norms("altup.router_norm"),
    ]
    laurel: list[Weight] = [
        builder.linear("laurel.linear_left", hidden, [rank], "column"),
        builder.linear("laurel.linear_right", rank, [hidden], "row"),
        *builder.norms("laurel.post_laurel_norm"),
    ]
    slides = builder.of_layer("layer_types", is_needed=True) == "sliding_attention"
    window = builder.require("sliding_window") if slides else 0
    cache = None if is_shared else builder.cache(window, "sliding" if window else "full")
    return decoder_layer(
        cache,
        builder.attention("self_attn", bias=bias, output_bias=bias, has_keys=not is_shared),
        builder.query_key_norms()[: 1 if is_shared else 2],
        builder.mlp("mlp", builder.of_layer(_SIZES, is_needed=True)),
        altup,
        laurel,
        _per_layer_input(builder),
        builder.two_norms(),
        builder.norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )


def gemma3n_beside(builder: LayerBuilder) -> list[Weight]:
    """Return the projections into and out of the streams."""
    names = [
        f"model.language_model.{name}.{stream}"
        for name in ("altup_projections", "altup_unembed_projections")
        for stream in range(builder.require("altup_num_inputs") - 1)
    ]
    return [builder.linear(name, builder.hidden_size, [builder.hidden_size], "column") for name in names]


# -- other families

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
        weights += builder.mlp("mlp", round_up(exact, 256))
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
        feed_forward = builder.router("feed_forward", count) + builder.experts("feed_forward.experts", count, size)
        feed_forward += builder.mlp("feed_forward.shared_expert", size)
    else:
        feed_forward = builder.mlp("feed_forward", builder.require("intermediate_size_mlp"))
    attention = builder.attention("self_attn", bias=bias, output_bias=bias)
    chunk, has_rope = builder.get("attention_chunk_size", 0), builder.of_layer("no_rope_layers")
    interval, kind = builder.get("no_rope_layer_interval", 4), builder.of_layer("layer_types")
    has_chunks = bool(chunk) and bool((builder.index + 1) % interval if has_rope is None else has_rope)
    if chunk and kind and (kind == "chunked_attention") != has_chunks:
        raise builder.disagreement("layer_types and no_rope_layers")
    cache = builder.cache(chunk, "chunked") if has_chunks else builder.cache()
    return decoder_layer(cache, attention, feed_forward, builder.two_norms())


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
    """Write the kind of each layer's feed-forward part, unless the config has it."""
    layers = range(config["num_hidden_layers"])
    config.setdefault("mlp_layer_types", ["sparse" if is_sparse(index) else "dense" for index in layers])


def head_bias(builder: LayerBuilder) -> list[Weight]:
    """Return the bias of Phi-3.5-MoE's output head, which ranks divide with the head."""
    return [Vocabulary(name="lm_head.bias", rows=builder.vocab_size, width=1)]
