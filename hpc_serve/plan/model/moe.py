"""Mixtures of experts: the second half of a layer, dense or with experts, and which layers have them.

Routers are never quantised, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_serve.plan.model.layers import LayerBuilder
from hpc_serve.plan.model.scheme import FP32
from hpc_serve.plan.model.weights import Weight


def experts_or_dense(
    builder: LayerBuilder,
    prefix: str,
    *,
    count: str,
    size: str = "moe_intermediate_size",
    size_alias: str | None = None,
    dense_before: str | None = None,
    dense_by_layer: bool = False,
    correction: bool | Sequence[Any] = False,
    wide_router: bool | Sequence[Any] = False,
    bias: bool = False,
    mlp_bias: bool = False,
    shared_count: str | None = None,
    shared_size: str | None = None,
    shared_width: str | None = None,
    shared_name: str = "shared_experts",
) -> list[Weight]:
    """Return the second half of a layer: routed experts with or without shared ones, or a dense MLP.

    `count` and `size` name the fields of the routed experts; some configs have the size as `size_alias`. The field
    `shared_size` gives the features of the shared experts; otherwise they are those of `shared_count` routed ones, or
    each has the features of the field `shared_width`.
    Layers before the field `dense_before` are dense. With `dense_by_layer`, `has_experts` decides which layers are.
    `correction` gives the router a bias, and `wide_router` has the router in 32 bit: always, or where a field has a
    value (field, value, default). `mlp_bias`: the dense MLP and the shared experts have biases.
    """
    is_dense = (
        builder.index < builder.get(dense_before, 0) if dense_before else dense_by_layer and not has_experts(builder)
    )
    if is_dense:
        return builder.mlp(prefix, builder.intermediate_size, bias=mlp_bias)
    number, features = builder.require(count), builder.either(size, size_alias, 0) if size_alias else 0
    if not features:
        features = builder.intermediate_size if size == "intermediate_size" else builder.require(size)
    corrected, is_wide = _holds(builder, correction), _holds(builder, wide_router)
    weights = builder.router(prefix, number, bias=bias, correction=corrected, scheme=FP32 if is_wide else None)
    weights += builder.experts(f"{prefix}.experts", number, features, bias=bias)
    shared_field = shared_size or shared_count
    shared = builder.get(shared_field, 0) if shared_field else 0
    if shared:
        each = builder.get(shared_width, features) if shared_width else features
        weights += builder.mlp(f"{prefix}.{shared_name}", shared if shared_size else each * shared, bias=mlp_bias)
    return weights


def _holds(builder: LayerBuilder, spec: bool | Sequence[Any]) -> bool:
    if isinstance(spec, bool):
        return spec
    field, value, default = spec
    return bool(builder.get(field, default) == value)


def qwen_moe_half(builder: LayerBuilder, prefix: str) -> list[Weight]:
    """Return the MLP of a Qwen layer: dense, or routed experts with or without a shared expert."""
    count = builder.either("num_experts", "num_local_experts", 0)
    is_sparse = (builder.index + 1) % builder.get("decoder_sparse_step", 1) == 0
    if not count or not is_sparse or builder.index in builder.get("mlp_only_layers", ()):
        return builder.mlp(prefix, builder.intermediate_size)
    shared = builder.get("shared_expert_intermediate_size", 0)
    weights = builder.router(prefix, count)
    weights += builder.experts(f"{prefix}.experts", count, builder.require("moe_intermediate_size"))
    if shared:
        weights += builder.mlp(f"{prefix}.shared_expert", shared)
        weights.append(builder.linear(f"{prefix}.shared_expert_gate", builder.hidden_size, [1], plain=True))
    return weights


def deepseek_half(builder: LayerBuilder, prefix: str) -> list[Weight]:
    """Return the MLP of a DeepSeek layer: dense, or routed experts and shared ones."""
    count = builder.either("n_routed_experts", "num_experts", 0)
    if not count:
        return builder.mlp(prefix, builder.intermediate_size)
    correction = ("topk_method", "noaux_tc", None)
    named = "n_routed_experts" if builder.config.peek("n_routed_experts") is not None else "num_experts"
    shared = "n_shared_experts"
    return experts_or_dense(
        builder, prefix, count=named, dense_by_layer=True, correction=correction, shared_count=shared
    )


def has_experts(builder: LayerBuilder) -> bool:
    """Return whether a layer has experts, by `mlp_layer_types` or by the number of dense layers at the beginning.

    `moe_layer_freq` is a number (every so many layers) or has a 0 or a 1 for each layer.
    """
    kind, frequency = builder.of_layer("mlp_layer_types"), builder.get("moe_layer_freq", 1)
    first = builder.get("first_k_dense_replace")
    if isinstance(frequency, (list, tuple)):
        each = builder.of_layer("moe_layer_freq", is_needed=True) == 1
    else:
        each = builder.index % frequency == 0
    found = bool(builder.index >= (first or 0) and each)
    if kind and first is not None and (kind == "sparse") != found:
        raise builder.disagreement("first_k_dense_replace, moe_layer_freq and mlp_layer_types")
    return kind == "sparse" if kind else found
