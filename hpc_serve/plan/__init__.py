"""What fits where: model × machines × engine options × workload → a layout, or why there is none.

Pure: values in, values out. No processes, no network, no torch; finding a model's config is hub.py's.
"""

from hpc_serve.plan.accelerator import AcceleratorSpec, ClusterSpec, accelerator
from hpc_serve.plan.catalog import resolve
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.memory import MemoryEstimate, estimate_memory
from hpc_serve.plan.model import ModelSpec, model_from_config
from hpc_serve.plan.planner import ServePlan, plan

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
