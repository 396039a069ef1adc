"""A plan, or the lack of one, as JSON with stable keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpc_serve.plan.choice.planner import NoLayoutError, ServePlan
from hpc_serve.plan.engine import LAYOUT_SIZES
from hpc_serve.plan.make import PlanResult
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.speed.estimate import SpeedEstimate, measured_classes, speed_range
from hpc_serve.plan.speed.step import EXPECTED, StepTime
from hpc_serve.plan.speed.throughput import Speed

_LAYOUT_KEYS = (*LAYOUT_SIZES, "num_nodes", "gpus_per_node")
_MEMORY_KEYS = (
    *("total_bytes", "requested_bytes", "weight_bytes", "model_loading_bytes", "activation_bytes"),
    *("cuda_graph_bytes", "non_torch_bytes", "kv_cache_bytes"),
)
_TRAFFIC_KEYS = ("input_tokens", "output_tokens", "longest_output_tokens", "prefix_hits", "acceptance_length")
_SPEED_KEYS = ("ttft_s", "queue_s", "tpot_s", "requests_per_s", "output_tokens_per_s")


def result_json(result: PlanResult) -> dict[str, Any]:
    """Return a plan, or the lack of one, under stable keys. Sizes are bytes on the GPU of the tightest rank."""
    about: dict[str, Any] = {"model": result.model.name, "gpu": result.accelerator.name}
    about |= _named(result.model, ("parameters", "active_parameters"))
    about |= {"model_weight_bytes": result.model.weight_bytes}
    if result.plan is None:
        assert result.error is not None
        return {**about, "fits": False, **_no_plan(result.error), "performance": None}
    found = result.estimates()
    return {
        **about,
        "fits": True,
        **_plan(result.plan),
        "performance": _performance(found) if found else None,
        "contexts": [
            _named(layout, _LAYOUT_KEYS)
            | {"by_requests": [{"at_once": count, "max_model_len": length} for count, length in lengths.items()]}
            for layout, lengths in result.contexts.items()
        ],
    }


def _plan(plan: ServePlan) -> dict[str, Any]:
    return {
        **_named(plan.layout, _LAYOUT_KEYS),
        **_named(plan, ("replicas", "max_model_len")),
        "minimum_gpus": asdict(plan.minimum_gpus),
        **_memory(plan.memory),
        **_named(plan.memory, ("kv_cache_tokens", "max_concurrency")),
        "vllm_args": list(plan.vllm_args),
        "reasons": list(plan.reasons),
        **_candidates(plan),
    }


def _no_plan(error: NoLayoutError) -> dict[str, Any]:
    """Return the keys of a plan where nothing fits. The layout is null, and `memory` is that of the nearest
    candidate."""
    return {
        **dict.fromkeys((*LAYOUT_SIZES, "replicas", "num_nodes", "gpus_per_node", "max_model_len")),
        "minimum_gpus": asdict(error.minimum_gpus),
        **_memory(next((candidate.memory for candidate in error.candidates if candidate.memory), None)),
        "kv_cache_tokens": 0,
        "max_concurrency": 0.0,
        "vllm_args": [],
        "reasons": str(error).splitlines(),
        **_candidates(error),
    }


def _memory(memory: MemoryEstimate | None) -> dict[str, Any]:
    return {
        "memory": _named(memory, _MEMORY_KEYS) if memory else None,
        "kv_bytes_per_token": memory.kv_bytes_per_token if memory else None,
    }


def _candidates(found: ServePlan | NoLayoutError) -> dict[str, Any]:
    """Return the candidates, and the options with which one fits or more requests do."""
    return {
        "candidates": [
            _named(one.layout, _LAYOUT_KEYS) | _named(one, ("verdict", "reason")) for one in found.candidates
        ],
        "remedies": [str(remedy) for remedy in found.suggestions],
    }


def _performance(estimates: list[SpeedEstimate]) -> dict[str, Any]:
    """Return the speeds, and how near such speeds are to published ones. Times are in seconds, rates per second."""
    roofline, traffic = estimates[0].roofline, estimates[0].traffic
    return {
        **_named(traffic, ("arrivals", "decode_only")),
        "figures": "ideal" if estimates[0].is_ideal else "expected",
        **_named(traffic, _TRAFFIC_KEYS),
        "factors": asdict(EXPECTED),
        "by_concurrency": [_estimate(estimate) for estimate in estimates],
        "range": speed_range(roofline, traffic),
        "measured_classes": measured_classes(roofline),
    }


def _estimate(estimate: SpeedEstimate) -> dict[str, Any]:
    return {
        "concurrency": estimate.traffic.concurrency,
        "running": estimate.batch,
        "bound": estimate.speed.bound,
        **_named(estimate, ("output_tokens_per_s_per_gpu", "output_tokens_per_usd")),
        **({"measured": asdict(estimate.measured)} if estimate.measured else {}),
        "ideal": _speed(estimate.ideal),
        "expected": _speed(estimate.expected),
    }


def _speed(speed: Speed) -> dict[str, Any]:
    times = [name for name in StepTime.__dataclass_fields__ if name.endswith("_s")]
    return {**_named(speed, _SPEED_KEYS), "step": _named(speed.step, (*times, "total_s"))}


def _named(value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: getattr(value, key) for key in keys}
