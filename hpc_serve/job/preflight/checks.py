"""The checks of one node: its GPUs, the model's weights, and what processes need.

GPUs must be as many as the engine needs, working, free, and of a kind that its torch knows. Weights must be whole, or
the node may fetch them. Processes need memory, shared memory, folders to write to, limits, commands, short paths. Each
check is a pure function: it gets the facts of its group, all facts of the node, and the needs of the run. `judge` has
the list of all checks, and those that compare nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_serve.hub.needed_files import FROM_FILES
from hpc_serve.job.preflight.facts import (
    CheckResult,
    CudaDevice,
    FolderFacts,
    GpusFacts,
    LimitFacts,
    MemoryFacts,
    Needs,
    NodeFacts,
    SoftwareFacts,
    WeightsFacts,
    found,
    not_checked,
    ok,
    worst,
)
from hpc_serve.rendezvous.store import Level
from hpc_serve.units import GIB, MIB, number_of
from hpc_serve.vllm.arguments import is_known, nearest_version
from hpc_serve.vllm.command import options_of_others

# -- GPUs

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


def gpus_there(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that the node has as many GPUs as the engine needs."""
    visible = "" if gpus.visible is None else f" (CUDA_VISIBLE_DEVICES={gpus.visible})"
    if gpus.cuda is not None and not gpus.cuda.error:
        count = len(gpus.cuda.devices)
        if count < needs.gpus:
            return found("too few for CUDA", found=count, needed=needs.gpus, visible=visible)
        return ok(f"{number_of(count, 'GPU')} ({gpus.cuda.devices[0].name})")
    if gpus.visible == "" and gpus.tool:
        return found("none visible", needed=needs.gpus)
    named = _count_named(gpus.visible)
    if 0 < named < needs.gpus:  # vLLM goes by this variable on ROCm as well
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


def gpus_working(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
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


def _broken(text: str, error: str, facts: NodeFacts) -> CheckResult:
    if error.startswith("no library"):
        return found("no libcuda", level=None if facts.torch_cuda else "warning", text=text)
    name = "no fabric" if error.startswith(_FABRIC) else "broken GPU"
    return found(name, level=None if error.startswith(_FINAL_ERRORS) else "warning", text=text)


def gpus_free(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
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


def driver(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that the driver is new enough for torch's CUDA version."""
    if not (wheel := facts.torch_cuda) or gpus.cuda is None or not gpus.cuda.cuda_version:
        return not_checked("no driver of CUDA, or no torch built for CUDA")
    has, wants = (gpus.cuda.cuda_version // 1000, gpus.cuda.cuda_version % 1000 // 10), _version(wheel)
    name = f"driver {gpus.driver}" if gpus.driver else "the driver"
    text = f"{name} supports CUDA {has[0]}.{has[1]}, torch was built with {wheel}"
    if has < wants:
        return found("old driver" if has[0] < wants[0] else "older driver", text=text, has=has[0])
    return ok(text)


def capability(gpus: GpusFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
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


# -- weights

# The hub's own names of refusals. Others, such as a proxy, refuse too. A repository without a config.json may be whole
# (HTTP 404).
_REFUSED = ("GatedRepo", "RepoNotFound")


def weights(weights: WeightsFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that a node reads a tokenizer and all weights of the index, and that no file is cut short."""
    result = _weights(weights, needs)
    may_fetch = weights.is_of_hub and not weights.is_offline
    if result.level == "ok" and weights.lacks_tokenizer and not needs.has_own_tokenizer and not may_fetch:
        return found("no tokenizer", folder=weights.folder)
    return result


def _weights(weights: WeightsFacts, needs: Needs) -> CheckResult:
    if weights.error:
        return found("weights unreadable", source=weights.source, error=weights.error)
    if needs.load_format == "dummy":
        return ok(f"{weights.source} has a config; the weights are random (--load-format dummy)")
    if needs.load_format not in FROM_FILES:
        return not_checked(f"--load-format {needs.load_format} reads them in its own way")
    if weights.damaged:
        more = len(weights.damaged) - 3
        damaged = "; ".join(weights.damaged[:3]) + (f"; and {more} more" if more > 0 else "")
        return found("weights damaged", folder=weights.folder, damaged=damaged)
    if weights.is_of_hub and (weights.missing or not weights.folder):
        return _to_fetch(weights)
    if weights.missing:
        return found("weights missing", folder=weights.folder, missing=weights.missing)
    files = number_of(weights.num_files, "file")
    return ok(f"{files}, {weights.total_bytes / GIB:.1f} GiB in {weights.folder}")


def _to_fetch(weights: WeightsFacts) -> CheckResult:
    text = f"{weights.source}: the cache holds {weights.missing or 'none of its weights'}"
    if weights.is_offline:  # with a config, another revision or a local patch might do
        name = "weights missing, offline" if weights.folder else "no weights, offline"
        return found(name, text=text, source=weights.source)
    if weights.hub_error in _REFUSED:
        token = "your token may not read it" if weights.has_token else "there is no token"
        return found("hub refuses", text=text, status=weights.hub_status, error=weights.hub_error, token=token)
    name = "hub does not answer" if weights.hub_status == 0 else "weights to fetch"
    return found(name, text=text, source=weights.source)


# -- what processes need

# A rank of vLLM takes 1 to 3 GiB of the node's memory beside its weights; one compiles with more.
_BYTES_PER_RANK = 2 * GIB
_ENOUGH_SHM_BYTES = GIB
_NO_SHM_BYTES = MIB
_ENOUGH_DISK_BYTES, _NO_DISK_BYTES = 2 * GIB, MIB
# Ray 2.60's head alone has 160 threads on a machine of two cores, and more on larger ones.
_ENOUGH_TASKS, _TOO_FEW_TASKS, _TOO_FEW_FOR_RAY = 2_048, 64, 160
_ENOUGH_FILES, _ENOUGH_PROCESSES = 4_096, 4_096
_ENOUGH_LOCKED_BYTES = 64 * MIB
# The kernel's limit of a UNIX socket's path, and what vLLM's names of sockets add to their folder.
_SOCKET_PATH, _SOCKET_NAME = 107, 37
_UNLIMITED = -1
# vLLM's queues between ranks, Ray's object store (job/ray/ray_cluster.py), and what one model compiles to.
_SHARED_BYTES_PER_RANK, _OBJECT_STORE_BYTES, _CACHES_BYTES = GIB // 4, GIB, 2 * GIB
LOGS = "logs"
"""The purpose of the one folder without which an engine serves."""
STAGED = "the copy of the model"
"""The purpose of the folder of --stage."""
CACHES = "caches"
"""The purpose of the folder where the engine keeps compiled code."""


def memory(memory: MemoryFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that the memory that Slurm gave is there, and is enough for the engine's data."""
    limit = min(memory.total_bytes, memory.limit_bytes or memory.total_bytes)
    whose = "the job's cgroup allows" if limit < memory.total_bytes else "the node has"
    offload = needs.offload_bytes * needs.ranks_per_node
    in_memory = {one.purpose: one.path for one in facts.folders or () if one.is_in_memory}
    staged = needs.staged_bytes if STAGED in in_memory else 0
    if offload > limit:
        return found("offload", whose=whose, limit=limit, offload=offload)
    if offload + staged > limit:
        return found("staged in memory", whose=whose, limit=limit, staged=staged)
    if needs.memory_bytes is not None and limit < needs.memory_bytes * 0.95:
        return found("memory below the job's", whose=whose, limit=limit, given=needs.memory_bytes)
    shared = _SHARED_BYTES_PER_RANK * needs.ranks_per_node + (_OBJECT_STORE_BYTES if needs.backend == "ray" else 0)
    kept = shared + staged + (_CACHES_BYTES if CACHES in in_memory else 0)
    wanted = offload + _BYTES_PER_RANK * needs.ranks_per_node + kept
    if limit < wanted:
        others = "".join(f", {path}" for path in in_memory.values() if not path.startswith("/dev/shm"))
        numbers: dict[str, Any] = {"ranks": needs.ranks_per_node, "wanted": wanted, "kept": kept, "folders": others}
        return found("memory for ranks", whose=whose, limit=limit, **numbers)
    used = f", {(memory.used_of_limit_bytes or 0) / GIB:.1f} of them used" if limit < memory.total_bytes else ""
    return ok(f"{whose} {limit / GIB:.1f} GiB{used}")


def shared_memory(memory: MemoryFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """/dev/shm is there, can be written to, and has room."""
    free, total = memory.shm_free_bytes, memory.shm_bytes
    if not memory.shm_is_writable:
        return found("no shm")
    if total and free < _NO_SHM_BYTES:
        return found("shm full", free=free, total=total)
    if (needs.ranks_per_node > 1 or needs.backend == "ray") and free < _ENOUGH_SHM_BYTES:
        return found("shm small", free=free, total=total)
    return ok(f"/dev/shm has {free / GIB:.1f} of {total / GIB:.1f} GiB free")


def staged(folders: Sequence[FolderFacts], facts: NodeFacts, needs: Needs) -> CheckResult:
    """There is room for the copy of the model that each node makes, and 1 GiB more."""
    if not needs.staged_bytes:
        return ok("the model is loaded from where it is, without --stage")
    folder = next((one for one in folders if one.purpose == STAGED), None)
    size = needs.staged_bytes / GIB
    if folder is None:
        return ok(f"{size:.1f} GiB, which another run on this node has copied")
    text = f"{size:.1f} GiB of the model are copied to {folder.path}, which has {folder.free_bytes / GIB:.1f} GiB free"
    if not folder.is_writable or folder.free_bytes < needs.staged_bytes + GIB:
        return found("staging", text=text)
    return ok(text)


def folders(folders: Sequence[FolderFacts], facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that the folders for caches, temporary files and logs are writable and have room."""
    return worst(map(_folder, folders)) if folders else not_checked("the folders were not looked at")


def _folder(folder: FolderFacts) -> CheckResult:
    level: Level = "warning" if folder.purpose == LOGS else "failed"  # an engine without logs serves
    named: dict[str, Any] = {"path": folder.path, "purpose": folder.purpose}
    if not folder.is_writable:
        return found("folder not writable", level=level, **named)
    if folder.free_bytes < _NO_DISK_BYTES or folder.free_files == 0:
        files = " and no file" if folder.free_files == 0 else ""
        return found("folder full", level=level, free=folder.free_bytes, files=files, **named)
    if folder.free_bytes < _ENOUGH_DISK_BYTES and folder.purpose != LOGS:
        return found("folder small", free=folder.free_bytes, **named)
    return ok(f"{folder.path} has {folder.free_bytes / GIB:.1f} GiB free")


def limits(limits: Mapping[str, LimitFacts], facts: NodeFacts, needs: Needs) -> CheckResult:
    """Limits on locked memory, open files, processes and the size of one, and on tasks of the job's cgroup."""
    return worst(_limit(name, limit, facts, needs) for name, limit in limits.items())


def _limit(name: str, limit: LimitFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    left = limit.soft - limit.used if limit.used is not None and limit.soft >= 0 else None
    has_too_few = left is not None and left < (_TOO_FEW_FOR_RAY if needs.backend == "ray" else _TOO_FEW_TASKS)
    if name == "tasks":
        if left is None:
            return ok("no limit on tasks")
        level: Level | None = "failed" if has_too_few else None
        text = f"the job's cgroup has room for {left} of {limit.soft} tasks (pids.max)"
        return found("tasks", level=level, text=text) if left < _ENOUGH_TASKS else ok(text)
    text = f"{name} is {_words(limit.soft)}" + ("" if limit.soft == limit.hard else f" (hard {_words(limit.hard)})")
    if name == "nproc" and has_too_few:
        return found("nproc used", text=text, used=limit.used)
    has_infiniband = facts.network is not None and facts.network.active_ib_ports > 0
    is_low = {
        "memlock": 0 <= limit.hard < _ENOUGH_LOCKED_BYTES and needs.num_nodes > 1 and has_infiniband,
        "nofile": 0 <= limit.hard < _ENOUGH_FILES,
        "nproc": 0 <= limit.soft < _ENOUGH_PROCESSES,
        "as": limit.soft != _UNLIMITED and needs.gpus > 0,
    }
    return found(name, text=text) if is_low.get(name) else ok(text)


def _words(value: int) -> str:
    return "unlimited" if value == _UNLIMITED else f"{value:,}"


def commands(software: SoftwareFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """Check that the engine's command, and Ray's, are in the node's environment, and that this vLLM has the options."""
    if software.missing_commands:
        return found("no command", names=" and ".join(software.missing_commands))
    installed = software.versions.get("vllm", "")
    if installed and not is_known(installed):
        return found("unknown version", installed=installed, nearest=nearest_version(installed))
    if installed and (lacking := dict(options_of_others(needs.engine_words, installed))):
        owners = ", ".join(sorted(set(lacking.values())))
        return found("no option", installed=installed, options=", ".join(lacking), owners=owners)
    return ok(", ".join(f"{name} {version}" for name, version in software.versions.items()))


def paths(software: SoftwareFacts, facts: NodeFacts, needs: Needs) -> CheckResult:
    """UNIX sockets below the folder for temporary files have paths that the kernel takes."""
    length = len(software.socket_folder) + _SOCKET_NAME
    text = f"sockets in {software.socket_folder} have {length} characters, {_SOCKET_PATH} are allowed"
    return found("long path", text=text) if length > _SOCKET_PATH else ok(text)
