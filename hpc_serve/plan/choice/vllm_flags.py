"""Turns a plan into options of `vllm serve` and back, and says what a plan assumes about the checkpoint.

The names of quantisation methods that people write and those that the pinned vLLM takes differ; this file matches them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import EngineConfig
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.vllm.arguments import read_arguments, value_of
from hpc_serve.vllm.options import load_data

_FIELDS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "block_size",
    "gpu_memory_utilization",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "enforce_eager",
    "enable_expert_parallel",
    "async_scheduling",
    *("enable_lora", "max_loras", "max_lora_rank", "fully_sharded_loras", "lora_target_modules"),
    *("cpu_offload_gb", "enable_prefix_caching", "language_model_only", "limit_mm_per_prompt"),
    *("speculative_config", "kv_transfer_config", "kv_offloading_size", "compilation_config", "optimization_level"),
    *("disable_hybrid_kv_cache_manager", "mamba_ssm_cache_dtype"),
    *("enable_eplb", "eplb_config", "runner", "hf_overrides"),
)
"""The options that decide about memory and layout: the fields of EngineConfig, and the context."""
_SWITCHES = (
    *("enforce_eager", "enable_expert_parallel", "async_scheduling", "enable_lora", "fully_sharded_loras"),
    *("enable_prefix_caching", "language_model_only", "disable_hybrid_kv_cache_manager", "enable_eplb"),
)
_DEFAULTS = {option.name: option.default for option in fields(EngineConfig)}
_JSON = (
    *("limit_mm_per_prompt", "speculative_config", "kv_transfer_config"),
    *("compilation_config", "eplb_config", "hf_overrides"),
)
_ONLINE = {
    "fp8": "fp8_per_tensor",
    "fp8_per_tensor": "fp8_per_tensor",
    "fp8_per_channel": "fp8_per_channel",
    "fp8_per_block": "fp8_per_block",
    "int8_per_channel_weight_only": "int8_per_channel_weight_only",
    "mxfp8": "mxfp8",
}
"""Methods with which vLLM 0.32 quantizes a 16-bit checkpoint while it loads it, and the name that it takes for each."""


def vllm_args(layout: Layout, max_model_len: int, engine: EngineConfig, model: ModelSpec) -> tuple[str, ...]:
    """The options after the model: the layout, the context, and what the engine was asked for."""
    args = [
        *("--tensor-parallel-size", str(layout.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(layout.pipeline_parallel_size)),
        *("--max-model-len", str(max_model_len)),
    ]
    for name in (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "max_loras",
        "max_lora_rank",
        "cpu_offload_gb",
        "kv_offloading_size",
        "optimization_level",
    ):
        value = getattr(engine, name)
        if value is not None:
            args += [_flag(name), str(value)]
    for name in ("dtype", "kv_cache_dtype", "mamba_ssm_cache_dtype", "runner"):
        if getattr(engine, name) != "auto":
            args += [_flag(name), getattr(engine, name)]
    method = _quantization_flag(engine, model)
    if method:
        args += [_flag("quantization"), method]
    for name in _SWITCHES:
        if getattr(engine, name) is not None and getattr(engine, name) != _DEFAULTS[name]:
            args.append(_flag(name) if getattr(engine, name) else _flag(f"no_{name}"))
    for name in _JSON:
        if getattr(engine, name):
            args += [_flag(name), json.dumps(getattr(engine, name))]
    if engine.lora_target_modules:
        args += [_flag("lora_target_modules"), *engine.lora_target_modules]
    return tuple(args)


def read_fields(words: Iterable[str]) -> dict[str, Any]:
    """What the options of `vllm serve` say about memory and layout, by EngineConfig's names and `max_model_len`.

    `uncounted` are the names of those that may change memory or speed and that no figure counts
    (vllm/data/uncounted.json). Raises InvalidRequestError for a context that vLLM is to choose itself, and for values
    of another version of vLLM.

    >>> read_fields(["--max-num-seqs=16", "-tp", "2", "--seed", "1", "--enforce-eager"])
    {'tensor_parallel_size': 2, 'max_num_seqs': 16, 'enforce_eager': True}
    """
    arguments = read_arguments(words)
    try:
        values = {name: value_of(arguments, _flag(name)) for name in _FIELDS}
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error} The plan is made with it, so hpc-serve must know it.") from None
    if values["max_model_len"] == -1:
        raise InvalidRequestError(
            "--max-model-len auto lets vLLM choose the context, and the plan needs it: write a number of tokens."
        )
    given, uncounted = {argument.name for argument in arguments}, load_data("uncounted.json")["uncounted"]
    values["uncounted"] = tuple(name for name in uncounted if name in given) or None
    return {name: value for name, value in values.items() if value is not None}


def assumption(engine: EngineConfig, model: ModelSpec) -> str | None:
    """A sentence on what the plan assumes about quantization that the checkpoint does not have. None: nothing."""
    if engine.quantization is None or not model.quantization.is_assumed:
        return None
    if _quantization_flag(engine, model):
        found = model.quantization
        if found.linear == found.plain:
            return f"vLLM quantises the experts to {found.experts.name} while it loads them, and nothing else."
        return f"vLLM quantises the 16-bit checkpoint to {found.linear.name} while it loads it."
    text = f"Sized as if {model.name} were quantised with {engine.quantization}: serve a checkpoint that is."
    if model.quantization.method == "bitsandbytes" and engine.version >= (0, 32):
        text += " vLLM 0.32 no longer has bitsandbytes."
    return text


def is_quantized_by_vllm(engine: EngineConfig, model: ModelSpec) -> bool:
    """Whether vLLM loads the checkpoint with this quantization: the checkpoint has it, or vLLM makes it itself."""
    return not model.quantization.is_assumed or _quantization_flag(engine, model) is not None


def _quantization_flag(engine: EngineConfig, model: ModelSpec) -> str | None:
    """The value of --quantization. None where the checkpoint says it, or where another checkpoint is needed."""
    if engine.quantization is None:
        return None
    if not model.quantization.is_assumed:
        return engine.quantization
    return _ONLINE.get(engine.quantization.lower().replace("-", "_"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
