"""From a request to a plan: finds the model, reads what the engine's own words ask for, and lets the planner decide.

The arithmetic is the planner's; here is only who tells it what.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub import FoundModel, find_spec
from hpc_serve.plan import EngineConfig, ModelSpec, ServePlan, Workload, plan
from hpc_serve.plan.hardware.cluster import machines
from hpc_serve.submit.request import ServeRequest

_VALUES: dict[str, Callable[[str], Any]] = {
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "kv_cache_memory_bytes": int,
    "block_size": int,
    "gpu_memory_utilization": float,
    "dtype": str,
    "quantization": str,
    "kv_cache_dtype": str,
}
_NOT_VLLMS = ("int8", "int4", "nvfp4")  # what `plan` takes as a size alone
_SWITCHES = ("enforce_eager", "enable_expert_parallel")
_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-q": "quantization"}


def plan_request(request: ServeRequest, *, stand_in: str | None = None) -> ServePlan:
    """The layout for a request. Raises UnknownModelError, InvalidRequestError, DoesNotFitError.

    A layout asked for in so many words is checked against what will be loaded: `stand_in` (HPC_SERVE_MODEL), where
    there is one. A layout to be chosen is that of the model named.
    """
    asked = engine_words(request.engine_args)
    if asked.get("quantization") in _NOT_VLLMS:
        raise InvalidRequestError(
            f"vLLM has no --quantization {asked['quantization']} for checkpoints of 16 bit: name a checkpoint that is "
            "quantised so (--model, or HPC_SERVE_MODEL); its own config says how."
        )
    found, spec = _find(request.model, asked)
    is_asked_for = request.tensor_parallel_size is not None and request.pipeline_parallel_size is not None
    if stand_in and is_asked_for:
        spec = replace(_find(stand_in, asked)[1], name=found.name)
    flags = {
        "tensor_parallel_size": request.tensor_parallel_size,
        "pipeline_parallel_size": request.pipeline_parallel_size,
        "max_model_len": request.max_model_len,
    }
    engine = flags | asked
    workload = Workload(max_model_len=engine.pop("max_model_len"))
    cluster = machines(
        request.gpu,
        total_bytes=request.gpu_memory_bytes,
        num_nodes=request.num_nodes,
        gpus_per_node=request.gpus_per_node,
    )
    names = found.served_model_names
    chosen = plan(spec, cluster, EngineConfig(**engine), workload, served_model_names=names)
    return replace(chosen, vllm_args=_without(chosen.vllm_args, asked))


def _find(name: str, asked: Mapping[str, Any]) -> tuple[FoundModel, ModelSpec]:
    """The model as the engine's words would have it; files of weights that are at hand are the truth."""
    return find_spec(name, dtype=asked.get("dtype", "auto"), quantization=asked.get("quantization"))


def engine_words(words: Sequence[str]) -> dict[str, Any]:
    """What the words for `vllm serve` say that decides memory and layout, by EngineConfig's names and `max_model_len`.

    >>> engine_words(["--max-num-seqs=16", "-tp", "2", "--seed", "1", "--enforce-eager"])
    {'max_num_seqs': 16, 'tensor_parallel_size': 2, 'enforce_eager': True}
    """
    found: dict[str, Any] = {}
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = _SHORT.get(option) or (option[2:].replace("-", "_") if option.startswith("--") else "")
        if name in _SWITCHES:
            found[name] = True
        elif name in _VALUES:
            if not equals:
                value = words[position + 1] if position + 1 < len(words) else ""
            try:
                found[name] = _VALUES[name](value)
            except ValueError:
                raise InvalidRequestError(
                    f"{option} is {value!r}, which the planner cannot read: write it as a plain number."
                ) from None
    return found


def _without(vllm_args: Sequence[str], asked: Container[str]) -> tuple[str, ...]:
    """The planner's words but for those that the person's own say again."""
    kept: list[str] = []
    said_again = False
    for word in vllm_args:
        if word.startswith("--"):
            said_again = word[2:].replace("-", "_") in asked
        if not said_again:
            kept.append(word)
    return tuple(kept)
