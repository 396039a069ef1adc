"""From a request to a plan: finds the model, reads what the engine's own words ask for, and lets the planner decide.

The arithmetic is the planner's; here is only who tells it what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub import FoundModel, find_spec
from hpc_serve.plan import EngineConfig, ModelSpec, ServePlan, Workload, plan
from hpc_serve.plan.choice.vllm_flags import read_fields
from hpc_serve.plan.hardware.cluster import machines
from hpc_serve.submit.request import ServeRequest
from hpc_serve.vllm.arguments import names_in, without

_NOT_VLLMS = ("int8", "int4", "nvfp4")  # what `plan` takes as a size alone


def plan_request(request: ServeRequest, *, stand_in: str | None = None) -> ServePlan:
    """The layout for a request. Raises UnknownModelError, InvalidRequestError, DoesNotFitError.

    A layout asked for in so many words is checked against what will be loaded: `stand_in` (HPC_SERVE_MODEL), where
    there is one. A layout to be chosen is that of the model named.
    """
    asked = read_fields(request.engine_args)
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
    return replace(chosen, vllm_args=without(chosen.vllm_args, names_in(request.engine_args)))


def _find(name: str, asked: Mapping[str, Any]) -> tuple[FoundModel, ModelSpec]:
    """The model as the engine's words would have it; files of weights that are at hand are the truth."""
    return find_spec(name, dtype=asked.get("dtype", "auto"), quantization=asked.get("quantization"))
