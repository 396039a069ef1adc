"""Says which types of weights, caches and activations vLLM refuses on an accelerator, for want of kernels.

NVIDIA's GPUs are known by their compute capability. What fits is candidates.py's question.
"""

from __future__ import annotations

import math

from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.hardware import AcceleratorSpec
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype
from hpc_serve.plan.model.spec import ModelSpec, distinct_layers

_WEIGHTS = {"awq": 7.5, "fp8": 7.5, "fbgemm_fp8": 8.0, "mxfp4": 8.0}
"""The least compute capability for weights, by method: `get_min_capability` in vLLM's layers/quantization."""
_NOT_IN_FLOAT16 = ("Gemma2For", "Gemma3For", "Glm4For")
"""Architectures of _FLOAT16_NOT_SUPPORTED_MODELS in vLLM's config/model.py."""
_FLASHINFER_HEADS = (0, 64, 128, 256, 512)


def has_kernels(method: str, device: AcceleratorSpec) -> bool:
    """Return whether vLLM has kernels for weights of a quantization method."""
    return _capability(device) >= _WEIGHTS.get(method, 0)


def refusal(model: ModelSpec, engine: EngineConfig, device: AcceleratorSpec) -> str | None:
    """Return what vLLM refuses, why, and what to use in its place. None: nothing."""
    has, method = _capability(device), model.quantization.method
    cache, plain = kv_cache_dtype(model, engine), "bfloat16" if has >= 8 else "float16"
    cache_cure = f"use --kv-cache-dtype {plain}" if model.quantization.kv_cache_dtype else "leave out --kv-cache-dtype"
    loaded = plain if model.dtype == "bfloat16" else model.dtype
    if loaded == "float16" and model.architecture.startswith(_NOT_IN_FLOAT16):
        return f"float16 for {model.architecture}: use --dtype {'bfloat16' if has >= 8 else 'float32'}."
    if cache == "fp8_e5m2" and method == "fp8" and not model.quantization.is_assumed:
        return "a cache in fp8_e5m2 for a checkpoint in fp8: leave out --kv-cache-dtype."
    for what, least, cure in (
        ("bfloat16", 8.0 if model.dtype == "bfloat16" and model.dtype_asked else 0, "use --dtype float16"),
        (f"{method} weights", _WEIGHTS.get(method, 0), "use other weights"),
        (f"a cache in {cache}", _least_for_cache(model) if cache.startswith("fp8") else 0, cache_cure),
    ):
        if has < least:
            return f"{what} on {device.product}: it needs compute capability {least:g}, here is {has:g}; {cure}."
    return None


def _capability(device: AcceleratorSpec) -> float:
    """Return what the device can do; without a bound where it is not NVIDIA's, or not known."""
    return device.compute_capability or math.inf


def _least_for_cache(model: ModelSpec) -> float:
    """Return the least compute capability for a cache in fp8: FlashInfer's, or Triton's where FlashInfer is of no use.

    Sources: flashinfer.py, triton_attn.py and mla/triton_mla.py in vLLM's v1/attention/backends.
    """
    layers = [layer for layer, _ in distinct_layers(model.layers)]
    has_sinks = any("sink" in weight.name for layer in layers for weight in layer.block.weights)
    is_of_flashinfer = all(layer.cache is None or layer.cache.head_dim in _FLASHINFER_HEADS for layer in layers)
    return 8.0 if is_of_flashinfer and not (model.is_mla or has_sinks) else 8.9
