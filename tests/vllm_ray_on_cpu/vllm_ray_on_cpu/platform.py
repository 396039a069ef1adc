"""The platform itself; imported by vLLM alone, in every one of its processes."""

from __future__ import annotations

import os

from vllm.platforms.cpu import CpuPlatform


class RayOnCpuPlatform(CpuPlatform):
    """vLLM's CPU platform whose ranks each take one of Ray's GPUs."""

    ray_device_key = "GPU"

    @classmethod
    def device_count(cls) -> int:
        """The node's declared GPUs: vLLM's own multi-node start finds by it which ranks share a node (1 on its CPU)."""
        return int(os.environ.get("SLURM_GPUS_ON_NODE") or super().device_count())
