"""Vision towers of multimodal models: their weights, and what images need while vLLM profiles memory.

catalog/towers.json describes each tower, and says how. Each pipeline stage holds the tower. Tensor parallelism divides
it as it divides the decoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import load_data
from hpc_serve.plan.model.config import missing
from hpc_serve.plan.model.spec import Block, ImageEncoder, Linear, Part, Vector, Weight


def vision_tower(name: str, config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the weights of a tower and what its images need, by the model's vision_config.

    Raises InvalidRequestError where the config lacks a size, or has sizes that do not go together.
    """
    about: Mapping[str, Any] = load_data("towers.json")["towers"][name]
    sizes: dict[str, Any] = {"hidden": hidden_size}
    for size, spec in about["sizes"].items():
        sizes[size] = _size(spec, config, sizes)
    layer = [weight for row in about["layers"] for weight in _weights(row, sizes)]
    names = [f"{about['prefix']}.{index}" for index in range(sizes["count"])]
    weights = [replace(weight, name=f"{name}.{weight.name}") for name in names for weight in layer]
    weights += [weight for row in about["weights"] for weight in _weights(row, sizes)]
    images = {field: _product_sum(text, sizes) for field, text in about["images"].items()}
    return Block(weights=tuple(weights)), ImageEncoder(**images)


def _weights(row: Sequence[Any], sizes: Mapping[str, Any]) -> Iterator[Weight]:
    """Yield the weight of one row, as often as the row says."""
    name, shape, options = (*row, {})[:3]
    inputs, _, outputs = shape.partition(" -> ")
    features = [_product_sum(text, sizes) for text in (inputs, *filter(None, outputs.split(", ")))]
    for _ in range(_product_sum(options.get("times", "1"), sizes)):
        if not outputs:
            yield Vector(name=name, size=features[0])
            continue
        yield Linear(
            name=name,
            inputs=Part(features[0]),
            outputs=tuple(map(Part, features[1:])),
            split=options.get("split", "none"),
            bias=bool(_product_sum(options.get("bias", "0"), sizes)),
        )


def _size(spec: Any, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """Return one of the sizes of a tower, by the fields of its config and the sizes before it."""
    if isinstance(spec, str):
        return _product_sum(spec, sizes)
    if isinstance(spec, list):
        return _first_field(spec, config, sizes)
    if "given" in spec:
        return int(bool(sizes[spec["given"]]))
    if "length" in spec:
        return len(config.get(spec["length"]) or ())
    return spec.get(str(config.get(spec["field"]) or ""), spec["else"])


def _first_field(spec: Sequence[Any], config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    for name in spec:
        value = name
        if isinstance(name, str):
            value = _product_sum(name[1:], sizes) if name.startswith("=") else _field(name, config)
        if value is not None:
            return math.prod(value) if isinstance(value, (list, tuple)) else value
    raise missing(f"vision_config.{spec[-1]}")


def _field(path: str, config: Mapping[str, Any]) -> Any:
    *outer, last = path.split(".")
    for name in outer:
        config = config.get(name) or {}
    return config.get(last)


def _product_sum(text: str, sizes: Mapping[str, Any]) -> int:
    """Return the value of a sum of products.

    >>> _product_sum("2*width + image/patch*width", {"width": 8, "image": 30, "patch": 14})
    32
    """
    total = 0
    for term in text.split(" + "):
        first, *rest = re.split(r"([*/])", term)
        value = _number(first, sizes)
        for sign, name in zip(rest[::2], rest[1::2]):
            value = value * _number(name, sizes) if sign == "*" else _divided(value, _number(name, sizes))
        total += value
    return math.floor(total)


def _number(name: str, sizes: Mapping[str, Any]) -> Any:
    return int(name) if name.isdigit() else sizes[name]


def _divided(value: Any, by: Any) -> Any:
    if not by:
        raise InvalidRequestError("The config's vision_config has sizes that do not go together: one of them is 0.")
    return value // by if type(by) is int else round(value / by)
