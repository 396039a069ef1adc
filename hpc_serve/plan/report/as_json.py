"""A plan, or the lack of one, as JSON with stable keys."""

from __future__ import annotations

from typing import Any

from hpc_serve.plan.choice.candidates import Candidate
from hpc_serve.plan.choice.contexts import LayoutContexts
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.choice.minimum import MinimumGpus
from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan
from hpc_serve.plan.hardware.accelerator import AcceleratorSpec
from hpc_serve.plan.model.spec import ModelSpec

_MEMORY_KEYS = (
    "total_bytes",
    "requested_bytes",
    "weight_bytes",
    "model_loading_bytes",
    "activation_bytes",
    "cuda_graph_bytes",
    "non_torch_bytes",
    "kv_cache_bytes",
)


def plan_json(plan: ServePlan, model: ModelSpec) -> dict[str, Any]:
    """A plan under stable keys. Sizes are bytes on the GPU of the tightest rank."""
    return {
        **_about(model, plan.accelerator),
        "fits": True,
        **_sizes(plan.layout),
        "replicas": plan.replicas,
        "max_model_len": plan.max_model_len,
        "minimum_gpus": _minimum(plan.minimum_gpus),
        "memory": {key: getattr(plan.memory, key) for key in _MEMORY_KEYS},
        "kv_bytes_per_token": plan.memory.kv_bytes_per_token,
        "kv_cache_tokens": plan.memory.kv_cache_tokens,
        "max_concurrency": plan.memory.max_concurrency,
        "vllm_args": list(plan.vllm_args),
        "reasons": list(plan.reasons),
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
        "remedies": [str(remedy) for remedy in plan.suggestions],
    }


def no_plan_json(error: NoLayoutError, model: ModelSpec, gpu: AcceleratorSpec) -> dict[str, Any]:
    """The same keys where nothing fits. The layout is null, and `memory` is that of the nearest candidate."""
    nearest = next((candidate.memory for candidate in error.candidates if candidate.memory), None)
    return {
        **_about(model, gpu),
        "fits": False,
        "tensor_parallel_size": None,
        "pipeline_parallel_size": None,
        "replicas": None,
        "num_nodes": None,
        "gpus_per_node": None,
        "max_model_len": None,
        "minimum_gpus": _minimum(error.minimum_gpus),
        "memory": {key: getattr(nearest, key) for key in _MEMORY_KEYS} if nearest else None,
        "kv_bytes_per_token": nearest.kv_bytes_per_token if nearest else None,
        "kv_cache_tokens": 0,
        "max_concurrency": 0.0,
        "vllm_args": [],
        "reasons": str(error).splitlines(),
        "candidates": [_candidate(candidate) for candidate in error.candidates],
        "remedies": [str(remedy) for remedy in error.suggestions],
    }


def contexts_json(found: LayoutContexts) -> dict[str, Any]:
    """The longest contexts of one layout. 0: none."""
    return {
        **_sizes(found.layout),
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


def _minimum(minimum: MinimumGpus) -> dict[str, Any]:
    return {"weights": minimum.weights, "full_context": minimum.full_context, "usable": minimum.usable}


def _sizes(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "num_nodes": layout.num_nodes,
        "gpus_per_node": layout.gpus_per_node,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        **_sizes(candidate.layout),
        "verdict": candidate.verdict,
        "reason": candidate.reason,
    }
