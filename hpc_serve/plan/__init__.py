"""What fits where: model × machines × engine options × workload → a layout, or why there is none.

Pure: values in, values out. No processes, no network, no torch; hub.py finds a model's config.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_serve.plan.catalog import resolve
    from hpc_serve.plan.choice.planner import ServePlan, plan
    from hpc_serve.plan.engine import EngineConfig, Workload
    from hpc_serve.plan.hardware.accelerator import AcceleratorSpec, accelerator
    from hpc_serve.plan.hardware.cluster import ClusterSpec
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

_MODULES = {
    "AcceleratorSpec": "hardware.accelerator",
    "ClusterSpec": "hardware.cluster",
    "EngineConfig": "engine",
    "MemoryEstimate": "memory.estimate",
    "ModelSpec": "model.spec",
    "ServePlan": "choice.planner",
    "Workload": "engine",
    "accelerator": "hardware.accelerator",
    "estimate_memory": "memory.estimate",
    "model_from_config": "model.architectures",
    "plan": "choice.planner",
    "resolve": "catalog",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `--help` imports the hardware's names without the planner."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
