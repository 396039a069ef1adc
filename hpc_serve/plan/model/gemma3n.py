"""Gemma 3n's decoder: four streams of hidden states (AltUp), a low-rank residual (Laurel), and layers' own embeddings.

The last layers take keys and values from a layer before, and each layer may have an MLP of its own size (MatFormer).
"""

from __future__ import annotations

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.gemma4 import per_layer_input
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Weight

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
        per_layer_input(builder),
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
