"""What fits where: model × machines × engine options × workload → a layout, or why there is none.

Pure: values in, values out. No processes, no network, no torch; finding a model's config is hub.py's.
"""

from hpc_serve.plan.catalog import resolve
from hpc_serve.plan.choice.planner import ServePlan, plan
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.hardware.accelerator import AcceleratorSpec, ClusterSpec, accelerator
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
