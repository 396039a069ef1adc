"""The platform itself; imported by vLLM alone, in every one of its processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # which itself imports the platform


class RayOnCpuPlatform(CpuPlatform):
    """vLLM's CPU platform whose ranks each take one of Ray's GPUs."""

    ray_device_key = "GPU"

    @classmethod
    def device_count(cls) -> int:
        """The node's declared GPUs: vLLM's own multi-node start finds by it which ranks share a node (1 on its CPU)."""
        return int(os.environ.get("SLURM_GPUS_ON_NODE") or super().device_count())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "vllm_ray_on_cpu.worker.EagerPipelineWorker"
