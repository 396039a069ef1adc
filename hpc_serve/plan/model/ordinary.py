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
from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.moe import deepseek_half, experts_or_dense, qwen_moe_half
from hpc_serve.plan.model.spec import DecoderLayer, LayerCache
from hpc_serve.plan.model.weights import Part, Weight

_KINDS = ("full_attention", "sliding_attention")
_NO = (False,)
_HALVES = {"qwen": qwen_moe_half, "deepseek": deepseek_half}


def ordinary_layer(builder: LayerBuilder, index: int, *, name: str) -> DecoderLayer:
    """Return a layer of the family that architectures.json describes under that name."""
    about, prefix = ordinary_layers()[name], f"model.layers.{index}"
    bias, output_bias = (_flag(builder, about.get(key, _NO)) for key in ("bias", "output_bias"))
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bias, output_bias=output_bias),
        _beside_attention(builder, f"{prefix}.self_attn", about),
        _second_half(builder, index, f"{prefix}.{about.get('half_name', 'mlp')}", about),
        builder.norms(*about["norms"]),
    )
    if "window_pattern" not in about:
        return DecoderLayer(block=weights, cache=builder.cache())
    pattern = about["window_pattern"]
    if not isinstance(pattern, int):
        pattern = builder.get(*pattern)
    turn = len(pattern) if isinstance(pattern, str) else pattern  # a letter for each layer of one turn ("LLLG")
    cache = window_cache(builder, index, pattern=turn)
    if cache.window:
        cache = replace(cache, window=cache.window + about.get("window_more", 0))
    return DecoderLayer(block=weights, cache=cache)


def _beside_attention(builder: LayerBuilder, prefix: str, about: Mapping[str, Any]) -> list[Weight]:
    """Return what the attention has beside its projections: norms over queries and keys, a gate, sinks."""
    weights: list[Weight] = []
    if _flag(builder, about.get("query_key_norms", _NO)):
        weights += builder.query_key_norms(prefix)
    if norms := about.get("norms_of_all_heads"):
        for name, count in (("q_norm", builder.heads), ("k_norm", builder.kv_heads)):
            weights.append(builder.vector(f"{prefix}.{name}", count * builder.head_dim, split=norms == "divided"))
    if about.get("gate"):
        heads = Part(builder.heads, builder.head_dim)
        weights.append(builder.linear(f"{prefix}.gate_proj", builder.hidden_size, [heads], "column"))
    if about.get("sinks"):
        weights.append(builder.vector(f"{prefix}.sinks", builder.heads, split=True))
    return weights


def _second_half(builder: LayerBuilder, index: int, prefix: str, about: Mapping[str, Any]) -> list[Weight]:
    """Return the MLP of a layer, or its experts."""
    if "experts" in about:
        return experts_or_dense(builder, index, prefix, **about["experts"])
    if "half" in about:
        return _HALVES[about["half"]](builder, index, prefix)
    bias, gated = _flag(builder, about.get("mlp_bias", _NO)), about.get("mlp_gate", True)
    weights = builder.mlp(prefix, builder.intermediate_size, bias=bias, gated=gated)
    if "learned_activation" in about:
        weights.append(builder.vector(f"{prefix}.act_fn", about["learned_activation"]))
    return weights


def _flag(builder: LayerBuilder, spec: Sequence[Any]) -> bool:
    """Return what the first of these fields says that the config has; the last of `spec` is the default."""
    *names, default = spec
    found = [builder.get(name) for name in names]
    return bool(next((value for value in found if value is not None), default))


def window_cache(builder: LayerBuilder, index: int, *, pattern: int = 0) -> LayerCache:
    """Return the cache of a layer that may have a sliding window.

    If the config has `layer_types`, they decide; next decides `max_window_layers`, the first layer with the window.
    Otherwise every `pattern`-th layer attends to all tokens and the others have the window. If `pattern` is 0, all
    layers have the window.
    """
    window, kinds, first = (
        builder.get("sliding_window", 0),
        builder.get("layer_types"),
        builder.get("max_window_layers"),
    )
    if kinds and kinds[index] not in _KINDS:
        kind = str(kinds[index])[:40]
        raise InvalidRequestError(f"The config's layer_types has {kind!r}: use {' or '.join(_KINDS)}.")
    if not window or builder.get("use_sliding_window") is False:
        return builder.cache()
    if kinds:
        slides = kinds[index] == "sliding_attention"
    elif first is not None:
        slides = index >= first
    else:
        slides = not pattern or (index + 1) % pattern != 0
    return builder.cache(window, "sliding") if slides else builder.cache()
