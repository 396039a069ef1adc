"""Ordinary decoder layers: one attention, one MLP or one set of experts, and norms.

catalog/architectures.json says how the layers of each family differ: in biases, in norms, in gates, in their experts,
and in the layers that have a sliding window. special.py has the families that need code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import ordinary_layers
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.moe import deepseek_half, experts_or_dense, qwen_moe_half
from hpc_serve.plan.model.spec import CacheKind, DecoderLayer
from hpc_serve.plan.model.weights import Part, Weight

_KINDS = ("full_attention", "sliding_attention")
_NO = (False,)
_HALVES = {"qwen": qwen_moe_half, "deepseek": deepseek_half}


def ordinary_layer(builder: LayerBuilder, *, name: str) -> DecoderLayer:
    """Return a layer of the family that architectures.json describes under that name."""
    about = ordinary_layers()[name]
    window = _window(builder, about.get("window_pattern"))
    builder = _with_own_heads(builder, about, has_window=window > 0)
    bias, output_bias = (_flag(builder, about.get(key, _NO)) for key in ("bias", "output_bias"))
    kind: CacheKind = "encoder" if about.get("is_encoder") else "sliding" if window else "full"
    more = about.get("window_more", 0) if kind == "sliding" else 0
    return decoder_layer(
        builder.cache(window + more, kind),
        builder.attention("self_attn", bias=bias, output_bias=output_bias),
        _beside_attention(builder, about, has_window=window > 0),
        _second_half(builder, about),
        builder.norms(*about["norms"]),
    )


def _with_own_heads(builder: LayerBuilder, about: Mapping[str, Any], *, has_window: bool) -> LayerBuilder:
    """Return the builder with the heads of a layer: those that the config names for it, or for layers with a window."""
    own = {"heads": builder.of_layer(about["heads_by_layer"]) if "heads_by_layer" in about else None}
    own["value_dim"] = builder.get(about["value_dim"]) if "value_dim" in about else None
    in_window = {size: builder.get(field) for size, field in about.get("sizes_in_window", {}).items()}
    if has_window:
        own |= {size: value for size, value in in_window.items() if value}
    return builder.with_heads(**own)


def _beside_attention(builder: LayerBuilder, about: Mapping[str, Any], *, has_window: bool) -> list[Weight]:
    """Return what the attention has beside its projections: norms over queries and keys, a gate, sinks."""
    weights: list[Weight] = []
    if _flag(builder, about.get("query_key_norms", _NO)):
        weights += builder.query_key_norms()
    if norms := about.get("norms_of_all_heads"):
        for name, count in (("q_norm", builder.heads), ("k_norm", builder.kv_heads)):
            weights.append(builder.vector(f"self_attn.{name}", count * builder.head_dim, split=norms == "divided"))
    whole, by_head = about.get("gate", False), _first(builder, about.get("head_gate", _NO))
    if whole or by_head:
        name, width = "gate_proj" if whole else "g_proj", 1 if by_head in (True, "per-head") else builder.head_dim
        weights.append(builder.linear(f"self_attn.{name}", builder.hidden_size, [Part(builder.heads, width)], "column"))
    if _flag(builder, about.get("sinks_in_window" if has_window else "sinks", _NO)):
        weights.append(builder.vector("self_attn.sinks", builder.heads, split=True))
    return weights


def _second_half(builder: LayerBuilder, about: Mapping[str, Any]) -> list[Weight]:
    """Return the MLP of a layer, or its experts."""
    prefix = about.get("half_name", "mlp")
    if "experts" in about:
        return experts_or_dense(
            builder, prefix, **about["experts"], mlp_bias=_flag(builder, about.get("half_bias", _NO))
        )
    if "half" in about:
        return _HALVES[about["half"]](builder, prefix)
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


def _window(builder: LayerBuilder, pattern: Any) -> int:
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
    window, kind = builder.get("sliding_window", 0), builder.of_layer("layer_types")
    first = builder.get("max_window_layers")
    if kind not in (None, *_KINDS):
        raise InvalidRequestError(f"The config's layer_types has {str(kind)[:40]!r}: use {' or '.join(_KINDS)}.")
    if builder.get("use_sliding_window") is False:
        return 0
    if kind:
        slides = kind == "sliding_attention"
    elif first is not None:
        slides = builder.index >= first
    else:
        slides = not turn or (builder.index + 1) % turn != 0
    return window if slides else 0
