"""A plan, or the lack of one, as JSON with stable keys."""

from __future__ import annotations

from typing import Any

from hpc_serve.plan.choice.candidates import Candidate, LayoutContexts
from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan
from hpc_serve.plan.hardware.accelerator import AcceleratorSpec
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.model.spec import ModelSpec

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_LAYOUT_KEYS = (*_SIZES, "num_nodes", "gpus_per_node")
_MINIMUM_KEYS = ("weights", "full_context", "usable")
_MEMORY_KEYS = (
    *("total_bytes", "requested_bytes", "weight_bytes", "model_loading_bytes", "activation_bytes"),
    *("cuda_graph_bytes", "non_torch_bytes", "kv_cache_bytes"),
)


def plan_json(plan: ServePlan, model: ModelSpec) -> dict[str, Any]:
    """Return a plan under stable keys. Sizes are bytes on the GPU of the tightest rank."""
    return {
        **_about(model, plan.accelerator),
        "fits": True,
        **_named(plan.layout, _LAYOUT_KEYS),
        **_named(plan, ("replicas", "max_model_len")),
        "minimum_gpus": _named(plan.minimum_gpus, _MINIMUM_KEYS),
        **_memory(plan.memory),
        **_named(plan.memory, ("kv_cache_tokens", "max_concurrency")),
        "vllm_args": list(plan.vllm_args),
        "reasons": list(plan.reasons),
        **_candidates(plan),
    }


def no_plan_json(error: NoLayoutError, model: ModelSpec, gpu: AcceleratorSpec) -> dict[str, Any]:
    """Return the same keys where nothing fits. The layout is null, and `memory` is that of the nearest candidate."""
    nearest = next((candidate.memory for candidate in error.candidates if candidate.memory), None)
    return {
        **_about(model, gpu),
        "fits": False,
        **dict.fromkeys((*_SIZES, "replicas", "num_nodes", "gpus_per_node", "max_model_len")),
        "minimum_gpus": _named(error.minimum_gpus, _MINIMUM_KEYS),
        **_memory(nearest),
        "kv_cache_tokens": 0,
        "max_concurrency": 0.0,
        "vllm_args": [],
        "reasons": str(error).splitlines(),
        **_candidates(error),
    }


def contexts_json(found: LayoutContexts) -> dict[str, Any]:
    """Return the longest contexts of one layout. 0: none."""
    return {
        **_named(found.layout, _LAYOUT_KEYS),
        "by_requests": [{"at_once": count, "max_model_len": length} for count, length in found.by_requests],
    }


def _about(model: ModelSpec, gpu: AcceleratorSpec) -> dict[str, Any]:
    return {
        "model": model.name,
        "gpu": gpu.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "model_weight_bytes": model.weight_bytes,
    }


def _memory(memory: MemoryEstimate | None) -> dict[str, Any]:
    return {
        "memory": _named(memory, _MEMORY_KEYS) if memory else None,
        "kv_bytes_per_token": memory.kv_bytes_per_token if memory else None,
    }


def _candidates(found: ServePlan | NoLayoutError) -> dict[str, Any]:
    """Return the candidates, and the options with which one fits or more requests do."""
    return {
        "candidates": [_candidate(candidate) for candidate in found.candidates],
        "remedies": [str(remedy) for remedy in found.suggestions],
    }


def _named(value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: getattr(value, key) for key in keys}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        **_named(candidate.layout, _LAYOUT_KEYS),
        "verdict": candidate.verdict,
        "reason": candidate.reason,
    }
