"""What the safetensors files of a checkpoint hold, by the model that transformers builds from its config.

Files of quantized checkpoints are laid out as their formats say. No weights are made. A method that has no format here
has no headers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpc_serve.plan.model.scheme import is_skipped

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, type as safetensors writes it, shape."""

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WITHOUT_WEIGHTS = ("quantization_config", "rope_scaling", "rope_parameters")
"""Fields that the plain model is built without: how positions are turned has no weights."""
_OUTSIDE = ("lm_head", "output")
"""Modules that are linear and that no method quantizes unless it says so."""


def checkpoint_tensors(config: Mapping[str, Any]) -> list[Tensor] | None:
    """The tensors of a checkpoint's files, or None where its format is not known here."""
    method = config.get("quantization_config", {}).get("quant_method")
    if method is not None and method not in _FORMATS:
        return None
    plain = _TYPES[str(_of_text(config, "torch_dtype") or _of_text(config, "dtype") or "bfloat16").split(".")[-1]]
    tensors: list[Tensor] = []
    for name, shape, is_linear in _parameters(config):
        quantized = config.get("quantization_config", {})
        if method is None or not is_linear or _is_skipped(name, quantized):
            tensors.append((name, plain, shape))
        else:
            tensors += _FORMATS[method](name, shape, quantized)
    return tensors


def _of_text(config: Mapping[str, Any], name: str) -> Any:
    return config.get(name) or config.get("text_config", {}).get(name)


def _parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, whether it is a linear weight that methods quantize) of each parameter; tied ones are one."""
    import torch
    import transformers

    wanted = {key: value for key, value in copy.deepcopy(dict(config)).items() if key not in _WITHOUT_WEIGHTS}
    model_class = getattr(transformers, wanted["architectures"][0])
    with torch.device("meta"):
        model = model_class._from_config(model_class.config_class.from_dict(wanted))
        model.tie_weights()
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        is_experts = ".experts." in name and len(shape) == 3
        yield name, shape, is_experts or name in linear


def _is_skipped(name: str, quantized: Mapping[str, Any]) -> bool:
    module = name.removesuffix(".weight")
    if module.split(".")[-1] in _OUTSIDE:
        return True
    if quantized["quant_method"] == "mxfp4":
        return ".experts." not in name
    listed = quantized.get("ignore") or quantized.get("modules_to_not_convert") or quantized.get("exclude") or ()
    return is_skipped(module, tuple(listed))


def _ints(name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]) -> list[Tensor]:
    """AWQ and GPTQ: eight numbers of 4 bit in an int32, with a scale and a zero point for each group."""
    bits, group = quantized.get("bits", 4), quantized.get("group_size", 128)
    numbers = math.prod(shape)
    return [
        (f"{name}.qweight", "I32", (numbers * bits // 32,)),
        (f"{name}.qzeros", "I32", (numbers // group * bits // 32,)),
        (f"{name}.scales", "F16", (numbers // group,)),
    ]


def _fp8(name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]) -> list[Tensor]:
    """One byte a number, with a scale for each block, or for each row where no block is named."""
    *outer, rows, columns = shape
    block = quantized.get("weight_block_size")
    scales = math.prod(outer) * (math.ceil(rows / block[0]) * math.ceil(columns / block[1]) if block else rows)
    return [(name, "F8_E4M3", shape), (f"{name}_scale", "F32", (scales,))]


def _compressed(name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]) -> list[Tensor]:
    """compressed-tensors: fp8 with a scale for each row, or int4 in int32 with a scale for each group."""
    weights = next(iter(quantized["config_groups"].values()))["weights"]
    if weights["num_bits"] == 8:
        return [(name, "F8_E4M3", shape), (f"{name}_scale", "BF16", (math.prod(shape[:-1]),))]
    numbers = math.prod(shape)
    return [
        (f"{name}_packed", "I32", (numbers // 8,)),
        (f"{name}_scale", "BF16", (numbers // weights["group_size"],)),
    ]


def _mxfp4(name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]) -> list[Tensor]:
    """Two numbers a byte, with a scale of a byte for each 32."""
    numbers = math.prod(shape)
    return [(f"{name}_blocks", "U8", (numbers // 2,)), (f"{name}_scales", "U8", (numbers // 32,))]


def _nvfp4(name: str, shape: tuple[int, ...], quantized: Mapping[str, Any]) -> list[Tensor]:
    """ModelOpt's NVFP4: two numbers a byte, with a scale of a byte for each 16."""
    numbers = math.prod(shape)
    return [(name, "U8", (numbers // 2,)), (f"{name}_scale", "F8_E4M3", (numbers // 16,))]


_FORMATS: dict[str, Callable[[str, tuple[int, ...], Mapping[str, Any]], list[Tensor]]] = {
    "awq": _ints,
    "gptq": _ints,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    "modelopt": _nvfp4,
}
