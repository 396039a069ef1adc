"""ModelOpt's quantization: one algorithm for a checkpoint, or one for each module (MIXED_PRECISION)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP8, NVFP4, Scheme

_MODELOPT = {
    "FP8": FP8_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": FP8_BLOCK,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": MXFP8,
}


def mixed_precision(config: Mapping[str, Any]) -> Mapping[str, Scheme] | None:
    """Return the scheme of each module that ModelOpt's MIXED_PRECISION names. None: it is one scheme for all."""
    settings = config.get("quantization") or config
    if str(settings.get("quant_algo")).upper() != "MIXED_PRECISION":
        return None
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise InvalidRequestError("quantization_config of MIXED_PRECISION has no quantized_layers.")
    found: dict[str, Scheme] = {}
    for name, about in layers.items():
        scheme = modelopt_scheme(about if isinstance(about, Mapping) else {})
        if found.setdefault(from_layers(str(name)), scheme) != scheme:
            raise InvalidRequestError(
                f"quantization_config has experts of different kinds in {from_layers(str(name))[:60]}: this planner "
                "knows one kind for the experts of a layer."
            )
    return found


def from_layers(module: str) -> str:
    """Return a module's name without what comes before its layer's number, and the experts of a layer as one.

    >>> from_layers("model.language_model.layers.3.mlp.experts.7.up_proj")
    'layers.3.mlp.experts'
    """
    name = _BEFORE_LAYERS.sub("", module, count=1)
    return name.split(".experts.", 1)[0] + ".experts" if ".experts." in name else name


_BEFORE_LAYERS = re.compile(r"^.*?(?=layers\.\d+\.|lm_head$)")


def modelopt_scheme(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of one of ModelOpt's algorithms. Raises InvalidRequestError for another."""
    named = settings.get("quant_algo", "FP8")
    found = _MODELOPT.get(str(named).upper())
    if found is None:
        raise InvalidRequestError(
            f"quantization_config of modelopt has quant_algo {str(named)[:40]!r}, which this planner does not "
            f"know; it knows {', '.join(_MODELOPT)} and MIXED_PRECISION."
        )
    group = settings.get("group_size")
    if found.group and group not in (None, found.group):
        raise InvalidRequestError(f"quantization_config has group_size {group}: {named} has groups of {found.group}.")
    return found
