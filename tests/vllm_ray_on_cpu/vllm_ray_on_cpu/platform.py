"""The platform itself; imported by vLLM alone, in every one of its processes."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform


class RayOnCpuPlatform(CpuPlatform):
    """vLLM's CPU platform whose ranks each take one of Ray's GPUs."""

    ray_device_key = "GPU"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker":
            parallel.worker_cls = "vllm_ray_on_cpu.worker.EagerPipelineWorker"
