"""vLLM plugins for tests: the CPU platform with Ray's declared GPUs as devices, and what many ranks on few cores need.

vLLM's own CPU platform refuses Ray. With this one, `ray start --num-gpus=8` on a machine without any GPU gives eight
workers, placed as on real ones. All of it stays out of the way unless VLLM_RAY_ON_CPU=1.
"""

from __future__ import annotations

import os


def is_on() -> bool:
    return os.environ.get("VLLM_RAY_ON_CPU") == "1"


def platform() -> str | None:
    """vLLM asks this for a platform: the class's name, or None for vLLM's own choice."""
    return "vllm_ray_on_cpu.platform.RayOnCpuPlatform" if is_on() else None


def general() -> None:
    """vLLM calls this early in each of its processes."""
    if is_on():
        from vllm_ray_on_cpu import repairs

        repairs.apply()
