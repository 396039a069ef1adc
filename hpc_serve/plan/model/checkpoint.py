"""Compares a model's files with its config. The files decide about bytes, the config about structure.

The comparison leaves out what vLLM does not load: layers beyond those of the config (multi-token prediction), rotary
tables, and an output head that is stored although it is the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.plan.model.weights import Vector

TOLERANCE = 0.002
"""Relative difference up to which config and files agree. Small scales and biases do not matter."""

_GRAIN_BYTES = 40_320
"""A layer changes by a multiple of this, which tensor parallel sizes divide: 1 to 10, 12, 14, 16, 32, 64 and 128."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NESTED = re.compile(r"\.(?:nested_absmax|nested_quant_map|quant_map|quant_state\.\w+)$")
_OF_TOWERS = ("vision", "audio_tower.", "model.encoder.")
"""Parts of names of tensors whose layers are those of a tower."""
_ABSMAX_BYTES = 4
"""bitsandbytes may quantize its scales too ("double quantisation"). vLLM undoes that when it loads them."""
_WIDE_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    dtype: str
    elements: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What the files of a folder hold: their tensors, or by an index alone the tensors' `names` and bytes in all.

    `size_bytes` is 0 where the index does not say it.
    """

    tensors: tuple[StoredTensor, ...] | None = None
    names: tuple[str, ...] = ()
    size_bytes: int = 0


def match_checkpoint(model: ModelSpec, stored: StoredWeights | None) -> tuple[ModelSpec, str | None]:
    """Return the model with layers of the size that its files have, and a sentence about the difference, if there is
    one.

    A model with an assumed quantization is not that of its files.
    """
    if stored is None or model.quantization.is_assumed:
        return model, None
    if stored.tensors is not None:
        stored_bytes = loaded_bytes(stored.tensors, model)
    elif stored.size_bytes > 0 and _loads_all(stored.names, model):
        stored_bytes = stored.size_bytes
    else:
        return model, None
    computed = model.weight_bytes
    difference = stored_bytes - computed
    if abs(difference) <= TOLERANCE * computed:
        return model, None
    per_layer = difference // model.num_hidden_layers // _GRAIN_BYTES * _GRAIN_BYTES
    extra = Vector(name="stored beyond the config", size=per_layer, split=True, element_bytes=1)
    sentence = (
        f"The files hold {stored_bytes / 1e9:.2f} GB to load, the config says {computed / 1e9:.2f} GB: "
        "the plan uses the size of the files."
    )
    return model.with_weights(lambda weights: (*weights, extra)), sentence


def loaded_bytes(tensors: Iterable[StoredTensor], model: ModelSpec) -> int:
    """Return the bytes that vLLM loads of these tensors.

    Plain floats become the model's type, all others stay as they are.
    """
    total = 0
    for tensor in tensors:
        if _is_skipped(tensor.name, model):
            continue
        if _NESTED.search(tensor.name):
            continue
        if tensor.name.endswith(".absmax"):
            total += tensor.elements * _ABSMAX_BYTES
            continue
        is_plain = tensor.dtype in _WIDE_FLOATS and "scale" not in tensor.name
        total += tensor.elements * model.dtype_bytes if is_plain else tensor.size_bytes
    return total


def _loads_all(names: Iterable[str], model: ModelSpec) -> bool:
    """Return whether vLLM loads all tensors of these names, and as they are stored.

    Then the sum of their bytes is what it loads. The files of a model in 32 bit are twice what is loaded.
    """
    return not (model.stored_wide or model.dtype_asked or any(_is_skipped(name, model) for name in names))


def _is_skipped(name: str, model: ModelSpec) -> bool:
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= model.num_hidden_layers and not any(part in name for part in _OF_TOWERS):
        return True
    if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
        return True
    return model.head is None and name.endswith(("lm_head.weight", "proj_out.weight"))
