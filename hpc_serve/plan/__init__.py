"""Decides what fits where: model × machines × engine options × workload → a layout, or why there is none.

Pure: values in, values out. No processes, no network, no torch; hub.py finds a model's config.

    from hpc_serve.plan import ClusterSpec, Workload, accelerator, model_from_config, plan, resolve

    known = resolve("405b")                          # of the catalogue; any config.json does as well
    model = model_from_config(known.config, name=known.name)
    chosen = plan(model, ClusterSpec(accelerator=accelerator("h100-80gb")), workload=Workload(concurrency=8))
    print(chosen.layout)                             # TP=8 PP=3 (3 nodes x 8)
    print(chosen.vllm_args)                          # what `vllm serve` is told
"""

from typing import TYPE_CHECKING

from hpc_serve.lazy import lazy_names

if TYPE_CHECKING:
    from hpc_serve.plan.catalog import resolve
    from hpc_serve.plan.choice.planner import ServePlan, plan
    from hpc_serve.plan.engine import EngineConfig, Workload
    from hpc_serve.plan.hardware import AcceleratorSpec, ClusterSpec, accelerator
    from hpc_serve.plan.memory.estimate import MemoryEstimate, estimate_memory
    from hpc_serve.plan.model.architectures import model_from_config
    from hpc_serve.plan.model.spec import ModelSpec

__all__ = [
    "AcceleratorSpec",
    "ClusterSpec",
    "EngineConfig",
    "MemoryEstimate",
    "ModelSpec",
    "ServePlan",
    "Workload",
    "accelerator",
    "estimate_memory",
    "model_from_config",
    "plan",
    "resolve",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AcceleratorSpec": "hardware",
            "ClusterSpec": "hardware",
            "EngineConfig": "engine",
            "MemoryEstimate": "memory.estimate",
            "ModelSpec": "model.spec",
            "ServePlan": "choice.planner",
            "Workload": "engine",
            "accelerator": "hardware",
            "estimate_memory": "memory.estimate",
            "model_from_config": "model.architectures",
            "plan": "choice.planner",
            "resolve": "catalog",
        },
    )
