"""Whether a node has the GPUs that the engine needs: as many, working, free, and of a kind that its torch knows."""

from __future__ import annotations

from hpc_serve.job.preflight.facts import CudaDevice, GpusFacts, Needs, NodeFacts
from hpc_serve.job.preflight.verdict import Seen, found, not_checked, ok
from hpc_serve.rendezvous.preflight import Level
from hpc_serve.sizes import GIB

# CUresult names after which no process of this job can use the device.
_FINAL_ERRORS = (
    *("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_SYSTEM_NOT_READY", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    *("CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    *("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"),
)
_FABRIC = "CUDA_ERROR_SYSTEM_NOT_READY"
# The least compute capability: of CUDA 13, which dropped Volta, and of vLLM's kernels before it.
_LEAST_OF_CUDA_13, _LEAST = (7, 5), (7, 0)
_BFLOAT16 = (8, 0)
# The first CUDA that compiles for a capability.
_FIRST_CUDA = {(8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (12, 0): (12, 8)}


def gpus_there(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the node has as many GPUs as the engine needs."""
    visible = "" if gpus.visible is None else f" (CUDA_VISIBLE_DEVICES={gpus.visible})"
    if gpus.cuda is not None and not gpus.cuda.error:
        count = len(gpus.cuda.devices)
        if count < needs.gpus:
            return found("too few for CUDA", found=count, needed=needs.gpus, visible=visible)
        return ok(f"{count} GPU{'s' if count > 1 else ''} ({gpus.cuda.devices[0].name})")
    if gpus.visible == "" and gpus.tool:
        return found("none visible", needed=needs.gpus)
    named = _count_named(gpus.visible)
    if 0 < named < needs.gpus and (gpus.tool or facts.torch_cuda):  # ROCm has variables of its own
        return found("too few named", visible=gpus.visible, named=named, needed=needs.gpus)
    if not gpus.tool:
        return not_checked("there is no nvidia-smi here")
    if gpus.error:
        return found("tool fails", tool=gpus.tool, error=gpus.error)
    if gpus.gpus is None:
        return not_checked(f"CUDA_VISIBLE_DEVICES names parts of GPUs ({gpus.visible})")
    if len(gpus.gpus) < needs.gpus:
        return found("too few listed", tool=gpus.tool, found=len(gpus.gpus), needed=needs.gpus, visible=visible)
    return ok(f"{len(gpus.gpus)} GPUs ({gpus.gpus[0].name})")


def _count_named(visible: str | None) -> int:
    """Return how many whole GPUs CUDA_VISIBLE_DEVICES names; 0 where it is not set, or names parts of GPUs."""
    words = [word.strip() for word in (visible or "").split(",") if word.strip()]
    return 0 if any(word.startswith("MIG-") for word in words) else len(words)


def gpus_working(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that a process of this job can write to the memory of each GPU and read it back."""
    if gpus.cuda is None:
        return not_checked(gpus.error or "no process tried CUDA here")
    if gpus.cuda.error:
        return _broken(f"CUDA says {gpus.cuda.error}", gpus.cuda.error, facts)
    devices = gpus.cuda.devices[: needs.gpus]
    for place, device in enumerate(devices):
        if device.error and not needs.is_full(device):
            return _broken(f"GPU {place} ({device.name}): CUDA says {device.error}", device.error, facts)
    if errors := sum(gpu.uncorrected_errors for gpu in gpus.gpus or ()):
        return found("memory errors", errors=errors)
    return ok(f"{len(devices)} GPUs wrote and read back their memory")


def _broken(text: str, error: str, facts: NodeFacts) -> Seen:
    if error.startswith("no library"):
        return found("no libcuda", level=None if facts.torch_cuda else "warning", text=text)
    name = "no fabric" if error.startswith(_FABRIC) else "broken GPU"
    return found(name, level=None if error.startswith(_FINAL_ERRORS) else "warning", text=text)


def gpus_free(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that each GPU has as much free memory as the engine asks for at its start."""
    if not (devices := _devices(gpus, needs)):
        return not_checked("no process tried CUDA here")
    for place, one in enumerate(devices):
        if needs.is_full(one):
            level: Level | None = "warning" if needs.sets_cache_bytes else None
            numbers = {"free": one.free_bytes, "total": one.total_bytes, "asked": needs.asked_bytes(one)}
            return found("GPU in use", level=level, place=place, part=needs.gpu_memory_utilization, **numbers)
    return ok(f"at least {min(device.free_bytes for device in devices) / GIB:.1f} GiB free on each")


def _devices(gpus: GpusFacts, needs: Needs) -> tuple[CudaDevice, ...]:
    """Return the GPUs that the engine will use, as CUDA shows them."""
    return gpus.cuda.devices[: needs.gpus] if gpus.cuda is not None else ()


def driver(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the driver is new enough for torch's CUDA version."""
    if not (wheel := facts.torch_cuda) or gpus.cuda is None or not gpus.cuda.cuda_version:
        return not_checked("no driver of CUDA, or no torch built for CUDA")
    has, wants = (gpus.cuda.cuda_version // 1000, gpus.cuda.cuda_version % 1000 // 10), _version(wheel)
    name = f"driver {gpus.driver}" if gpus.driver else "the driver"
    text = f"{name} supports CUDA {has[0]}.{has[1]}, torch was built with {wheel}"
    if has < wants:
        return found("old driver" if has[0] < wants[0] else "older driver", text=text, has=has[0])
    return ok(text)


def capability(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the wheel and the engine's options know this kind of GPU."""
    known = [(device, _version(device.capability)) for device in _devices(gpus, needs) if device.capability]
    if not known or not (built_for := facts.torch_cuda):
        return not_checked("no compute capability is known, or no torch built for CUDA")
    wheel = _version(built_for)
    device, least = min(known, key=lambda one: one[1])
    text = f"{device.name} has compute capability {device.capability}, torch was built with CUDA {built_for}"
    wanted = _LEAST_OF_CUDA_13 if wheel >= (13, 0) else _LEAST
    if least < wanted:
        return found("old GPU", text=text, wanted=f"{wanted[0]}.{wanted[1]}")
    if needs.dtype == "bfloat16" and least < _BFLOAT16:
        return found("no bfloat16", name=device.name, capability=device.capability)
    newest, most = max(known, key=lambda one: one[1])
    first = next((cuda for least_of, cuda in sorted(_FIRST_CUDA.items(), reverse=True) if most >= least_of), None)
    if first and wheel < first:
        cuda = f"{first[0]}.{first[1]}"
        return found("new GPU", name=newest.name, capability=newest.capability, first=cuda, wheel=built_for)
    return ok(text)


def _version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return (0, 0)
