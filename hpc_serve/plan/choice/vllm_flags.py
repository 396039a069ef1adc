"""Turns a plan into options of `vllm serve` and back, and says what a plan assumes about the checkpoint.

People and the pinned vLLM name some quantisation methods differently. This file matches the names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import LAYOUT_SIZES, EngineConfig
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.vllm.arguments import read_arguments, value_of
from hpc_serve.vllm.options import load_data

_NOT_VLLMS = ("vllm_version", "use_v1", "uncounted", "takes_whole_texts")
_ORDER = (
    *(("int | None", "float | None", "str | None"), ("str",), ("quantization",), ("bool", "bool | None")),
    *(("Mapping[str, Any] | None",), ("tuple[str, ...] | None",)),
)
"""Types of options in the order in which they are written. --quantization stands among them by its name."""
_OPTIONS = [
    option
    for types in _ORDER
    for option in fields(EngineConfig)
    if option.name not in _NOT_VLLMS and ("quantization" if option.name == "quantization" else option.type) in types
]
_FIELDS = ("max_model_len", *(option.name for option in _OPTIONS))
"""The options that decide about memory and layout: the fields of EngineConfig, and the context."""
_ONLINE_METHODS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only", "mxfp8")
"""Methods with which vLLM 0.32 quantizes a 16-bit checkpoint while it loads it. `fp8` is its first."""


def vllm_args(layout: Layout, max_model_len: int, engine: EngineConfig, model: ModelSpec) -> tuple[str, ...]:
    """Return the options after the model: the layout, the context, and what the engine was asked for."""
    args = [
        *("--tensor-parallel-size", str(layout.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(layout.pipeline_parallel_size)),
        *("--max-model-len", str(max_model_len)),
    ]
    if layout.data_parallel_size > 1:
        args += ["--data-parallel-size", str(layout.data_parallel_size)]
    of_plan = {**dict.fromkeys(LAYOUT_SIZES), "quantization": _quantization_flag(engine, model)}
    for option in _OPTIONS:
        value = of_plan[option.name] if option.name in of_plan else getattr(engine, option.name)
        args += _words(option.name, value, option.default)
    return tuple(args)


def _words(name: str, value: Any, default: Any) -> list[str]:
    """Return an option of `vllm serve` with its value. Empty for vLLM's default, and for an empty list or object."""
    if value is None or value == default or value in ({}, ()):
        return []
    if isinstance(value, bool):
        return [_flag(name if value else f"no_{name}")]
    if isinstance(value, tuple):
        return [_flag(name), *value]
    return [_flag(name), json.dumps(value) if isinstance(value, Mapping) else str(value)]


def read_fields(words: Iterable[str]) -> dict[str, Any]:
    """Return the options of `vllm serve` for memory and layout, by EngineConfig's names and `max_model_len`.

    `uncounted` are the options given that may change memory or speed, and that no figure counts
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
    """Return a sentence on what the plan assumes about quantization that the checkpoint does not have.

    None: nothing.
    """
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
    """Return whether vLLM loads the checkpoint with this quantization: the checkpoint has it, or vLLM makes it
    itself."""
    return not model.quantization.is_assumed or _quantization_flag(engine, model) is not None


def _quantization_flag(engine: EngineConfig, model: ModelSpec) -> str | None:
    """Return the value of --quantization. None where the checkpoint says it, or where another checkpoint is needed."""
    if engine.quantization is None:
        return None
    if not model.quantization.is_assumed:
        return engine.quantization
    method = engine.quantization.lower().replace("-", "_")
    method = "fp8_per_tensor" if method == "fp8" else method
    return method if method in _ONLINE_METHODS else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
