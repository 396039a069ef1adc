"""Ordinary decoder layers: one attention, one MLP or one set of experts, and norms.

catalog/architectures.json says how the layers of each family differ: in biases, in norms, in gates, in their experts,
and in the layers that have a sliding window. special.py has the families that need code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import ordinary_layers
from hpc_serve.plan.model.layers import HeadSizes, LayerBuilder, block
from hpc_serve.plan.model.moe import deepseek_half, experts_or_dense, qwen_moe_half
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Part, Weight

_KINDS = ("full_attention", "sliding_attention")
_NO = (False,)
_HALVES = {"qwen": qwen_moe_half, "deepseek": deepseek_half}


def ordinary_layer(builder: LayerBuilder, index: int, *, name: str) -> DecoderLayer:
    """Return a layer of the family that architectures.json describes under that name."""
    about, prefix = ordinary_layers()[name], f"model.layers.{index}"
    window = _window(builder, index, about.get("window_pattern"))
    sizes = _head_sizes(builder, index, about, has_window=window > 0)
    bias, output_bias = (_flag(builder, about.get(key, _NO)) for key in ("bias", "output_bias"))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=output_bias, sizes=sizes),
        _beside_attention(builder, f"{prefix}.self_attn", about, sizes, has_window=window > 0),
        _second_half(builder, index, f"{prefix}.{about.get('half_name', 'mlp')}", about),
        builder.norms(*about["norms"]),
    )
    if about.get("is_encoder"):
        return DecoderLayer(block=weights, cache=builder.cache(window, "encoder", sizes))
    if not window:
        return DecoderLayer(block=weights, cache=builder.cache(sizes=sizes))
    return DecoderLayer(block=weights, cache=builder.cache(window + about.get("window_more", 0), "sliding", sizes))


def _head_sizes(builder: LayerBuilder, index: int, about: Mapping[str, Any], *, has_window: bool) -> HeadSizes:
    """Return the heads of a layer: the config's, those that it names for the layer, or for layers with a window."""
    each = builder.get(about["heads_by_layer"]) if "heads_by_layer" in about else None
    own = {"heads": each[index] if each else None}
    own["value_dim"] = builder.get(about["value_dim"]) if "value_dim" in about else None
    in_window = {size: builder.get(field) for size, field in about.get("sizes_in_window", {}).items()}
    if has_window:
        own |= {size: value for size, value in in_window.items() if value}
    return replace(builder.sizes, **{size: value for size, value in own.items() if value})


def _beside_attention(
    builder: LayerBuilder, prefix: str, about: Mapping[str, Any], sizes: HeadSizes, *, has_window: bool
) -> list[Weight]:
    """Return what the attention has beside its projections: norms over queries and keys, a gate, sinks."""
    weights: list[Weight] = []
    if _flag(builder, about.get("query_key_norms", _NO)):
        weights += builder.query_key_norms(prefix)
    if norms := about.get("norms_of_all_heads"):
        for name, count in (("q_norm", builder.heads), ("k_norm", builder.kv_heads)):
            weights.append(builder.vector(f"{prefix}.{name}", count * builder.head_dim, split=norms == "divided"))
    whole, by_head = about.get("gate", False), _first(builder, about.get("head_gate", _NO))
    if whole or by_head:
        name, width = "gate_proj" if whole else "g_proj", 1 if by_head in (True, "per-head") else sizes.head_dim
        weights.append(builder.linear(f"{prefix}.{name}", builder.hidden_size, [Part(sizes.heads, width)], "column"))
    if _flag(builder, about.get("sinks_in_window" if has_window else "sinks", _NO)):
        weights.append(builder.vector(f"{prefix}.sinks", sizes.heads, split=True))
    return weights


def _second_half(builder: LayerBuilder, index: int, prefix: str, about: Mapping[str, Any]) -> list[Weight]:
    """Return the MLP of a layer, or its experts."""
    if "experts" in about:
        return experts_or_dense(
            builder, index, prefix, **about["experts"], mlp_bias=_flag(builder, about.get("half_bias", _NO))
        )
    if "half" in about:
        return _HALVES[about["half"]](builder, index, prefix)
    bias, gated = _flag(builder, about.get("mlp_bias", _NO)), about.get("mlp_gate", True)
    weights = builder.mlp(prefix, builder.intermediate_size, bias=bias, gated=gated)
    if "learned_activation" in about:
        weights.append(builder.vector(f"{prefix}.act_fn", about["learned_activation"]))
    return weights


def _flag(builder: LayerBuilder, spec: Sequence[Any]) -> bool:
    return bool(_first(builder, spec))


def _first(builder: LayerBuilder, spec: Sequence[Any]) -> Any:
    """Return the first of these fields that the config has; the last of `spec` is the default. All are read."""
    *names, default = spec
    found = [builder.get(name) for name in names]
    return next((value for value in found if value is not None), default)


def _window(builder: LayerBuilder, index: int, pattern: Any) -> int:
    """Return the sliding window of a layer, or 0.

    If the config has `layer_types`, they decide; next decides `max_window_layers`, the first layer with the window.
    Otherwise every so many layers attend to all tokens and the others have the window: `pattern` or the field that it
    names with its default. If that is 0, all layers have the window. None: the family has no windows.
    """
    if pattern is None:
        return 0
    if not isinstance(pattern, int):
        pattern = builder.get(*pattern)
    turn = len(pattern) if isinstance(pattern, str) else pattern  # a letter for each layer of one turn ("LLLG")
    window, kinds = builder.get("sliding_window", 0), builder.get("layer_types")
    first = builder.get("max_window_layers")
    if kinds and kinds[index] not in _KINDS:
        kind = str(kinds[index])[:40]
        raise InvalidRequestError(f"The config's layer_types has {kind!r}: use {' or '.join(_KINDS)}.")
    if builder.get("use_sliding_window") is False:
        return 0
    if kinds:
        slides = kinds[index] == "sliding_attention"
    elif first is not None:
        slides = index >= first
    else:
        slides = not turn or (index + 1) % turn != 0
    return window if slides else 0
