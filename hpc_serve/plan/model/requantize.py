"""A model as it would be if its checkpoint were quantised: what quantisers leave alone (routers, embeddings, head,
norms) stays in 16 bit.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.plan.model.quantization import Scheme
from hpc_serve.plan.model.spec import DecoderLayer, ModelSpec
from hpc_serve.plan.model.weights import Block, Linear, Weight


def quantised(model: ModelSpec, scheme: Scheme) -> ModelSpec:
    """The same model with the linear layers of its decoder in `scheme`."""
    known: dict[int, DecoderLayer] = {}
    layers = []
    for layer in model.layers:
        if id(layer) not in known:
            weights = tuple(_quantised_weight(weight, scheme) for weight in layer.block.weights)
            known[id(layer)] = replace(layer, block=Block(weights=weights))
        layers.append(known[id(layer)])
    return replace(model, layers=tuple(layers))


def _quantised_weight(weight: Weight, scheme: Scheme) -> Weight:
    if not isinstance(weight, Linear) or weight.name.endswith(("gate", "gate_proj")):
        return weight
    return replace(weight, scheme=scheme)
