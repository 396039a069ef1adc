"""Builds the modules that model families share, from the fields of a Hugging Face config.

They are attention, MLPs and experts, with the choice of the layers that have experts. Quantization is asked by the
names of the checkpoint: there, the name of a layer is before that of its module. Routers are never quantised, as in
vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.quantization import Quantization
from hpc_serve.plan.model.scheme import FP32, Scheme
from hpc_serve.plan.model.spec import Block, CacheKind, DecoderLayer, LayerCache, Linear, Part, Vector, Weight


class LayerBuilder:
    """Builds weights from the text part of a config and its quantization.

    The builder of a layer knows the layer's `index`, and names modules within it: equal layers compare equal. `outside`
    builds what is in no layer. Of its attention there are `heads` and `kv_heads`, `head_dim` is the width of a query
    and a key, `value_dim` that of a value.
    """

    def __init__(self, config: CheckedConfig, quantization: Quantization, dtype: str) -> None:
        self.config = config
        self.quantization = quantization
        self.dtype_bytes = 4 if dtype == "float32" else 2
        self.outside, self.index, self.prefix = self, 0, ""
        self.hidden_size: int = self.require("hidden_size")
        self.vocab_size: int = self.require("vocab_size")
        self.num_layers: int = self.require("num_hidden_layers")
        self.heads: int = self.require("num_attention_heads")
        self.kv_heads: int = self.either("num_key_value_heads", "num_kv_heads", self.heads)
        self.head_dim: int = self.either("head_dim", "attention_head_dim", self.hidden_size // self.heads)
        self.value_dim = self.head_dim
        self.intermediate_size: int = self.either("intermediate_size", "ffn_hidden_size", 0)
        if not isinstance(self.intermediate_size, int):
            raise InvalidRequestError("The config's intermediate_size is a list: this family has one for all layers.")

    def layer(self, index: int) -> LayerBuilder:
        """Return the builder of one layer, where the checkpoint calls the layers model.layers."""
        return self._with(index=index, prefix=f"model.layers.{index}.")

    def named(self, layers: str) -> LayerBuilder:
        """Return the builder of the same layer, where the checkpoint calls the `layers` so."""
        return self._with(prefix=f"{layers}.{self.index}.")

    def with_heads(self, **sizes: int | None) -> LayerBuilder:
        """Return the builder of the same layer with other heads: sizes that are None or 0 stay."""
        return self._with(**{name: size for name, size in sizes.items() if size})

    def _with(self, **changes: Any) -> LayerBuilder:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field, or `default` where it is missing or null."""
        return self.config.get(key, default)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return whether the field is true."""
        return bool(self.get(key, default))

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these fields that there is. Later fields are not read."""
        return next((value for key in keys if (value := self.get(key)) is not None), default)

    def either(self, key: str, alias: str, default: int) -> int:
        """Return the field, which some configs have by another name.

        Raises InvalidRequestError where the two differ.
        """
        value, other = self.get(key), self.get(alias)
        if None not in (value, other) and value != other:
            raise InvalidRequestError(
                f"The config's {key} is {value} and its {alias} is {other}: they must be the same."
            )
        found: int = self.first(key, alias, default=default)
        return found

    def require(self, key: str) -> Any:
        """Return the field. Raises InvalidRequestError where it is missing or null."""
        return self.config[key]

    def of_layer(self, key: str, *, is_needed: bool = False, inside: Mapping[str, Any] | None = None) -> Any:
        """Return the layer's value in a field that has one for each layer, and maybe more for layers that predict.

        None: the field is missing or empty. `inside`: the object that has the field. Raises InvalidRequestError where
        it has too few values, or `is_needed` and missing.
        """
        config = self.config if inside is None else inside
        each = config[key] if is_needed else config.get(key) or None
        if each is not None and len(each) < self.num_layers:
            raise InvalidRequestError(f"The config's {key} names {len(each)} of its {self.num_layers} layers.")
        return None if each is None else each[self.index]

    def disagreement(self, fields: str) -> InvalidRequestError:
        """Return the error for fields that say different things of this layer."""
        return InvalidRequestError(f"The config's {fields} do not agree about layer {self.index}.")

    def linear(
        self,
        name: str,
        inputs: Part | int,
        outputs: Sequence[Part | int],
        split: Literal["column", "row", "none"] = "none",
        *,
        bias: bool = False,
        plain: bool = False,
        scheme: Scheme | None = None,
        experts: int = 0,
    ) -> Linear:
        """Return a linear module in `scheme`, else in the scheme that the checkpoint has for it.

        `plain`: it is never quantised. `experts`: it is one tensor with the matrices of so many experts.
        """
        if scheme is None:
            known, is_fused = self.quantization, len(outputs) > 1
            scheme = known.plain if plain else known.scheme_of(self.prefix + name, is_fused=is_fused)
        return Linear(
            name=name,
            inputs=inputs if isinstance(inputs, Part) else Part(inputs),
            outputs=tuple(part if isinstance(part, Part) else Part(part) for part in outputs),
            split=split,
            bias=bias,
            copies=experts or 1,
            is_expert=experts > 0,
            scheme=scheme,
        )

    def vector(
        self, name: str, size: int, *, split: bool = False, element_bytes: int | None = None, units: int = 0
    ) -> Vector:
        """Return a weight that is not a matrix."""
        width = element_bytes or self.dtype_bytes
        return Vector(name=name, size=size, split=split, element_bytes=width, units=units)

    def norms(self, *names: str) -> list[Weight]:
        """Return norms over the hidden size."""
        return [self.vector(name, self.hidden_size) for name in names]

    def two_norms(self) -> list[Weight]:
        """Return the norms of most decoders: before attention, and before the MLP."""
        return self.norms("input_layernorm", "post_attention_layernorm")

    def attention(
        self,
        prefix: str,
        *,
        bias: bool = False,
        output_bias: bool = False,
        gated: bool = False,
        has_keys: bool = True,
        inputs: int | None = None,
    ) -> list[Weight]:
        """Return grouped-query attention: q, k and v fused, and the output projection. `gated`: q has a gate of its
        size.

        Without `has_keys`, the layer takes keys and values from another one. `inputs` are this layer's own, where
        layers differ.
        """
        query = Part(self.heads, 2 * self.head_dim if gated else self.head_dim)
        keys = [Part(self.kv_heads, width, replicate=True) for width in (self.head_dim, self.value_dim) if has_keys]
        return [
            self.linear(f"{prefix}.q_proj", inputs or self.hidden_size, [query, *keys], "column", bias=bias),
            self.linear(
                f"{prefix}.o_proj", Part(self.heads, self.value_dim), [self.hidden_size], "row", bias=output_bias
            ),
        ]

    def query_key_norms(self) -> list[Weight]:
        """Return norms over the queries and the keys of each head."""
        return [self.vector(f"self_attn.{name}", self.head_dim) for name in ("q_norm", "k_norm")]

    def mlp(self, prefix: str, size: int, *, bias: bool = False, gated: bool = True) -> list[Weight]:
        """Return an MLP: gate and up fused, and down. Without `gated`: up and down."""
        first = [size, size] if gated else [size]
        return [
            self.linear(f"{prefix}.up_proj", self.hidden_size, first, "column", bias=bias),
            self.linear(f"{prefix}.down_proj", size, [self.hidden_size], "row", bias=bias),
        ]

    def experts(
        self,
        name: str,
        count: int,
        size: int,
        *,
        hidden_size: int | None = None,
        gated: bool = True,
        bias: bool = False,
    ) -> list[Weight]:
        """Return routed experts, fused into two tensors."""
        scheme = self.quantization.scheme_of(self.prefix + name, is_expert=True)
        hidden_align, size_align = scheme.expert_align
        hidden = Part(hidden_size or self.hidden_size, align=hidden_align)
        part = Part(size, align=size_align)
        first = (part, part) if gated else (part,)
        return [
            self.linear(f"{name}.up_proj", hidden, first, "column", bias=bias, scheme=scheme, experts=count),
            self.linear(f"{name}.down_proj", part, [hidden], "row", bias=bias, scheme=scheme, experts=count),
        ]

    def router(
        self, prefix: str, count: int, *, bias: bool = False, correction: bool = False, scheme: Scheme | None = None
    ) -> list[Weight]:
        """Return the router, which chooses experts: in `scheme` or unquantised, and with a 32-bit bias where
        `correction`."""
        gate = self.linear(f"{prefix}.gate", self.hidden_size, [count], bias=bias, plain=True, scheme=scheme)
        if not correction:
            return [gate]
        return [gate, self.vector(f"{prefix}.gate.e_score_correction_bias", count, element_bytes=4)]

    def cache(self, window: int = 0, kind: CacheKind = "full") -> LayerCache:
        """Return the cache of a layer with attention."""
        return LayerCache(
            kind=kind, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim, window=window
        )


def block(*groups: Sequence[Weight]) -> Block:
    """Return one block of all weights in these groups."""
    return Block(weights=tuple(weight for group in groups for weight in group))


def decoder_layer(cache: LayerCache | None, *groups: Sequence[Weight], derived: Sequence[Weight] = ()) -> DecoderLayer:
    """Return a layer with all weights in these groups."""
    return DecoderLayer(block=block(*groups), cache=cache, derived=block(derived))


# -- the feed-forward part of a layer: a dense MLP, or a mixture of experts


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
    """Return the feed-forward part of a layer: routed experts with or without shared ones, or a dense MLP.

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


def qwen_feed_forward(builder: LayerBuilder, prefix: str) -> list[Weight]:
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


def deepseek_feed_forward(builder: LayerBuilder, prefix: str) -> list[Weight]:
    """Return the MLP of a DeepSeek layer: dense, or routed experts and shared ones."""
    count = builder.either("n_routed_experts", "num_experts", 0)
    if not count:
        return builder.mlp(prefix, builder.intermediate_size)
    named = "n_routed_experts" if builder.config.peek("n_routed_experts") is not None else "num_experts"
    correction, shared = ("topk_method", "noaux_tc", None), "n_shared_experts"
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
