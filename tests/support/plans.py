"""Models, estimates, layouts and plans, in the few words in which tests of the planner ask for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hpc_serve.hub.hub import find_spec
from hpc_serve.plan import (
    ClusterSpec,
    EngineConfig,
    MemoryEstimate,
    ModelSpec,
    ServePlan,
    Workload,
    accelerator,
    estimate_memory,
    model_from_config,
    plan,
    resolve,
)
from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.hardware import AcceleratorSpec, cluster_named
from hpc_serve.plan.make import FoundParts, PlanRequest, PlanResult, make_plan
from hpc_serve.plan.memory.loaded import loaded_model
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.throughput import Traffic

WORKLOAD = ("max_model_len", "concurrency", "replicas", "request_tokens")


@cache
def spec(name: str, **options: Any) -> ModelSpec:
    """A model of the catalogue. `options` are those of `model_from_config`."""
    entry = resolve(name)
    return model_from_config(entry.config, name=entry.name, **options)


def changed(name: str, **changes: Any) -> ModelSpec:
    """A model of the catalogue whose config has these fields."""
    return model_from_config({**resolve(name).config, **changes}, name=name)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, nodes: int = 1) -> Layout:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return Layout(**sizes, num_nodes=nodes)


def estimate(
    model: str | ModelSpec,
    gpu: str | AcceleratorSpec = "h100-80gb",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    length: int = 8192,
    draft: ModelSpec | None = None,
    **options: Any,
) -> MemoryEstimate:
    """The memory of a layout for a model with all that the engine's `options` load."""
    engine = EngineConfig(**options)
    return estimate_memory(
        loaded_model(spec(model) if isinstance(model, str) else model, engine, draft),
        accelerator(gpu) if isinstance(gpu, str) else gpu,
        engine,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        max_model_len=length,
    )


def replica(
    model: str | ModelSpec,
    gpu: str | AcceleratorSpec = "h100-80gb",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    nodes: int = 1,
    length: int = 8192,
    **options: Any,
) -> ReplicaSpeeds:
    """The speeds of a layout for a model with all that the engine's `options` load."""
    engine, device = EngineConfig(**options), accelerator(gpu) if isinstance(gpu, str) else gpu
    loaded = loaded_model(spec(model) if isinstance(model, str) else model, engine)
    return ReplicaSpeeds(
        roofline=Roofline(loaded, device, engine, layout(tp, pp, dp, nodes)),
        memory=estimate(model, device, tp=tp, pp=pp, dp=dp, length=length, **options),
        traffic=Traffic(),
    )


def roofline(name: str, gpu: str | AcceleratorSpec = "h100-80gb", **asked: Any) -> Roofline:
    """How long a step of such a replica takes."""
    return replica(name, gpu, **asked).roofline


def speed(of: ReplicaSpeeds, **traffic: Any) -> SpeedEstimate:
    """The speed of a replica under other traffic than its own."""
    asked = replace(of.traffic, **traffic)
    return replace(of, traffic=asked).at(asked.concurrency)


def plan_inputs(
    name: str, gpu: str = "h100-80gb", *, length: int = 8192, nodes: int | None = None, **options: Any
) -> PlanInputs:
    """The inputs of a plan for contexts of so many tokens, on such machines."""
    return PlanInputs(
        model=spec(name),
        cluster=replace(cluster_named(gpu, num_nodes=nodes), is_whole=False),
        engine=EngineConfig(**options),
        workload=Workload(max_model_len=length),
        max_model_len=length,
    )


def planned(name: str, gpu: str = "h100-80gb", *, nodes=None, size=None, quantization=None, **options) -> ServePlan:
    """The layout that `plan` chooses on such machines. `options` are fields of Workload, and of EngineConfig."""
    cluster = ClusterSpec(accelerator=accelerator(gpu), num_nodes=nodes, gpus_per_node=size)
    workload = Workload(**{key: options.pop(key) for key in WORKLOAD if key in options})
    engine = EngineConfig(quantization=quantization, **options)
    return plan(spec(name, quantization=quantization, dtype=engine.dtype), cluster, engine, workload)


def made_plan(model: Any, gpu: str = "h100-80gb", *, total_bytes: Any = None, **asked: Any) -> PlanResult:
    """The plan that `make_plan` makes. `asked` are fields of PlanRequest."""
    found = find_spec(model, environ={})[1] if isinstance(model, str) else model
    parts = FoundParts(model=found, cluster=cluster_named(gpu, total_bytes=total_bytes))
    return make_plan(PlanRequest(model=found.name, gpu=gpu, **asked), parts)
