"""A vLLM platform plugin for tests: the CPU platform, with Ray's declared GPUs as the devices its workers take.

vLLM's own CPU platform refuses Ray. With this one, `ray start --num-gpus=8` on a machine without any GPU gives eight
workers, placed as on real ones. It stays out of the way unless VLLM_RAY_ON_CPU=1.
"""

from __future__ import annotations

import os


def platform() -> str | None:
    """The entry point that vLLM calls: our platform's class, or None for vLLM's own choice."""
    if os.environ.get("VLLM_RAY_ON_CPU") == "1":
        return "vllm_ray_on_cpu.platform.RayOnCpuPlatform"
    return None
