"""Whether a node has the GPUs that the engine needs: as many, working, free, and of a kind that its torch knows."""

from __future__ import annotations

from hpc_serve.job.preflight.facts import CudaDevice, CudaFacts, NodeFacts
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, failed, not_checked, ok, warning
from hpc_serve.sizes import GIB

_NO_TOOL = "neither nvidia-smi nor rocm-smi is here"
_NONE_NEEDED = "the engine needs no GPUs"
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


def gpus_there(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the node has as many GPUs as the engine needs."""
    gpus = facts.gpus
    if not needs.gpus or gpus is None:
        return not_checked(_NONE_NEEDED if not needs.gpus else "the GPUs were not listed")
    wanted = f"the engine needs {needs.gpus}"
    cure = (
        "Ask Slurm for as many (--gpus-per-node, --gres), or exclude the node (--exclude) and tell its administrators."
    )
    if gpus.cuda is not None and not gpus.cuda.error:
        found = len(gpus.cuda.devices)
        if found >= needs.gpus:
            return ok(f"{found} GPU{'s' if found > 1 else ''} ({gpus.cuda.devices[0].name})")
        return failed(f"CUDA shows {found} GPUs to this job, {wanted}{_visible(gpus.visible)}", cure)
    if gpus.visible == "" and gpus.tool == "nvidia-smi":
        return failed(
            f"CUDA_VISIBLE_DEVICES is set and empty, so no GPU is visible, {wanted}",
            "Ask Slurm for GPUs (--gpus-per-node, --gres), and let nothing in the site's modules or the script set it.",
        )
    named = _count_named(gpus.visible)
    if gpus.tool in ("", "nvidia-smi") and 0 < named < needs.gpus:
        return failed(
            f"CUDA_VISIBLE_DEVICES={gpus.visible} names {named} of the GPUs, {wanted}",
            "Leave it to Slurm: let nothing in the site's modules, your shell's start-up files or the script set it. "
            "Else ask Slurm for as many (--gpus-per-node, --gres).",
        )
    if not gpus.tool:
        return not_checked(_NO_TOOL)
    if gpus.error:
        return warning(f"{gpus.tool} says: {gpus.error}", "Run it on that node; its administrators know the driver.")
    if gpus.gpus is None:
        return not_checked(f"CUDA_VISIBLE_DEVICES names parts of GPUs ({gpus.visible})")
    if len(gpus.gpus) < needs.gpus:
        return warning(f"{gpus.tool} lists {len(gpus.gpus)} GPUs of this job, {wanted}{_visible(gpus.visible)}", cure)
    return ok(f"{len(gpus.gpus)} GPUs ({gpus.gpus[0].name})")


def _count_named(visible: str | None) -> int:
    """Return how many whole GPUs CUDA_VISIBLE_DEVICES names; 0 where it is not set, or names parts of GPUs."""
    words = [word.strip() for word in (visible or "").split(",") if word.strip()]
    return 0 if any(word.startswith("MIG-") for word in words) else len(words)


def _visible(visible: str | None) -> str:
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def gpus_working(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that a process of this job can write to the memory of each GPU and read it back."""
    if not needs.gpus:
        return not_checked(_NONE_NEEDED)
    gpus = facts.gpus
    if gpus is None or gpus.cuda is None:
        return not_checked(gpus.error if gpus is not None and gpus.error else "no process tried CUDA here")
    cuda = gpus.cuda
    if cuda.error:
        return _broken(f"CUDA says {cuda.error}", cuda.error, cuda, facts)
    for place, device in enumerate(cuda.devices[: needs.gpus]):
        if device.error and not _is_full(device, needs):
            return _broken(f"GPU {place} ({device.name}): CUDA says {device.error}", device.error, cuda, facts)
    errors = sum(gpu.uncorrected_errors for gpu in gpus.gpus or ())
    if errors:
        return warning(
            f"{errors} uncorrected memory errors since the driver was loaded",
            "The engine may end at any time: exclude the node (--exclude) and tell its administrators.",
        )
    return ok(f"{min(len(cuda.devices), needs.gpus)} GPUs wrote and read back their memory")


def _broken(seen: str, error: str, cuda: CudaFacts, facts: NodeFacts) -> Seen:
    if error.startswith(_FABRIC):
        cure = (
            "The node's fabric manager does not run (nvidia-fabricmanager): exclude the node, tell its administrators."
        )
    elif error.startswith("no library"):
        cure = (
            "The driver's libcuda.so.1 is not to be found: is this a node with GPUs? In a container, pass the GPUs in "
            "(apptainer: --nv); an LD_LIBRARY_PATH of a module may hide it."
        )
    else:
        cure = "Exclude the node (--exclude) and tell its administrators; `nvidia-smi -q` there says more."
    is_cuda_wheel = facts.software is not None and bool(facts.software.torch_cuda)
    is_final = error.startswith(_FINAL_ERRORS) or (error.startswith("no library") and is_cuda_wheel)
    return failed(seen, cure) if is_final else warning(seen, cure)


def gpus_free(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that each GPU has as much free memory as the engine asks for at its start."""
    if not needs.gpus:
        return not_checked(_NONE_NEEDED)
    devices = _devices(facts, needs)
    if not devices:
        return not_checked("no process tried CUDA here")
    for place, device in enumerate(devices):
        if _is_full(device, needs):
            seen = (
                f"GPU {place} has {device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free, the engine "
                f"asks for {_asked_bytes(device, needs) / GIB:.1f} ({needs.gpu_memory_utilization:.0%})"
            )
            cure = (
                "Another program uses that GPU (`nvidia-smi` names it): ask for whole GPUs or nodes (--exclusive), "
                "exclude the node, or lower --gpu-memory-utilization (after --)."
            )
            return warning(seen, cure) if needs.sets_cache_bytes else failed(seen, cure)
    return ok(f"at least {min(device.free_bytes for device in devices) / GIB:.1f} GiB free on each")


def _devices(facts: NodeFacts, needs: Needs) -> tuple[CudaDevice, ...]:
    """Return the GPUs that the engine will use, as CUDA shows them."""
    cuda = facts.gpus.cuda if facts.gpus is not None else None
    return cuda.devices[: needs.gpus] if cuda is not None else ()


def _is_full(device: CudaDevice, needs: Needs) -> bool:
    return device.total_bytes > 0 and device.free_bytes < _asked_bytes(device, needs)


def _asked_bytes(device: CudaDevice, needs: Needs) -> float:
    return device.total_bytes * needs.gpu_memory_utilization


def driver(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the driver is new enough for torch's CUDA version."""
    software = facts.software
    cuda = facts.gpus.cuda if facts.gpus is not None else None
    if not needs.gpus or software is None or not software.torch_cuda or cuda is None or not cuda.cuda_version:
        return not_checked("no driver of CUDA, or no torch built for CUDA")
    has, wants = (cuda.cuda_version // 1000, cuda.cuda_version % 1000 // 10), _version(software.torch_cuda)
    name = f"driver {facts.gpus.driver}" if facts.gpus is not None and facts.gpus.driver else "the driver"
    seen = f"{name} supports CUDA {has[0]}.{has[1]}, torch was built with {software.torch_cuda}"
    if has[0] < wants[0]:
        return failed(seen, f"Install a wheel for CUDA {has[0]} (envs/README.md), or use nodes with a newer driver.")
    if has < wants:
        return warning(seen, "Most of it works within one major version; kernels compiled on the node may not.")
    return ok(seen)


def capability(facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the wheel and the engine's options know this kind of GPU."""
    software = facts.software
    devices = _devices(facts, needs)
    known = [(device, _version(device.capability)) for device in devices if any(_version(device.capability))]
    if not known or software is None or not software.torch_cuda:
        return not_checked("no compute capability is known, or no torch built for CUDA")
    wheel = _version(software.torch_cuda)
    device, least = min(known, key=lambda one: one[1])
    seen = f"{device.name} has compute capability {device.capability}, torch was built with CUDA {software.torch_cuda}"
    wanted = _LEAST_OF_CUDA_13 if wheel >= (13, 0) else _LEAST
    if least < wanted:
        return failed(f"{seen}, which needs {wanted[0]}.{wanted[1]}", "Use newer GPUs, or a wheel of an older CUDA.")
    if needs.dtype == "bfloat16" and least < _BFLOAT16:
        return failed(
            f"{device.name} has compute capability {device.capability}, --dtype bfloat16 needs 8.0",
            "Use --dtype half (after --), or newer GPUs.",
        )
    newest, most = max(known, key=lambda one: one[1])
    first = next((cuda for least_of, cuda in sorted(_FIRST_CUDA.items(), reverse=True) if most >= least_of), None)
    if first and wheel < first:
        return warning(
            f"{newest.name} has compute capability {newest.capability}, known to CUDA {first[0]}.{first[1]} and later; "
            f"torch was built with {software.torch_cuda}",
            f"Install a wheel for CUDA {first[0]}.{first[1]} or later, if the engine finds no kernel image.",
        )
    return ok(seen)


def _version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    parts = text.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return (0, 0)
