"""Whether a node has what processes need: memory, shared memory, folders to write to, limits, commands, short paths.

Each check gets the facts of its group, all facts of the node, and the needs of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_serve.job.preflight.facts import FolderFacts, LimitFacts, MemoryFacts, Needs, NodeFacts, SoftwareFacts
from hpc_serve.job.preflight.verdict import Seen, found, not_checked, ok, worst
from hpc_serve.rendezvous.preflight import Level
from hpc_serve.sizes import GIB, MIB
from hpc_serve.vllm.allowed import options_of_others
from hpc_serve.vllm.options import is_known, nearest_version

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
# vLLM's queues between ranks, Ray's object store (job/run/ray_cluster.py), and what one model compiles to.
_SHARED_BYTES_PER_RANK, _OBJECT_STORE_BYTES, _CACHES_BYTES = GIB // 4, GIB, 2 * GIB
LOGS = "logs"
"""The purpose of the one folder without which an engine serves."""
STAGED = "the copy of the model"
"""That of the folder of --stage."""
CACHES = "caches"
"""That of the folder of what the engine compiles."""


def memory(seen: MemoryFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the memory that Slurm gave is there, and is enough for the engine's data."""
    limit = min(seen.total_bytes, seen.limit_bytes or seen.total_bytes)
    whose = "the job's cgroup allows" if limit < seen.total_bytes else "the node has"
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
    used = f", {(seen.used_of_limit_bytes or 0) / GIB:.1f} of them used" if limit < seen.total_bytes else ""
    return ok(f"{whose} {limit / GIB:.1f} GiB{used}")


def shared_memory(seen: MemoryFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """/dev/shm is there, can be written to, and has room."""
    free, total = seen.shm_free_bytes, seen.shm_bytes
    if not seen.shm_is_writable:
        return found("no shm")
    if total and free < _NO_SHM_BYTES:
        return found("shm full", free=free, total=total)
    if (needs.ranks_per_node > 1 or needs.backend == "ray") and free < _ENOUGH_SHM_BYTES:
        return found("shm small", free=free, total=total)
    return ok(f"/dev/shm has {free / GIB:.1f} of {total / GIB:.1f} GiB free")


def staged(seen: Sequence[FolderFacts], facts: NodeFacts, needs: Needs) -> Seen:
    """There is room for the copy of the model that each node makes, and 1 GiB more."""
    if not needs.staged_bytes:
        return ok("the model is loaded from where it is, without --stage")
    folder = next((one for one in seen if one.purpose == STAGED), None)
    size = needs.staged_bytes / GIB
    if folder is None:
        return ok(f"{size:.1f} GiB, which another run on this node has copied")
    text = f"{size:.1f} GiB of the model are copied to {folder.path}, which has {folder.free_bytes / GIB:.1f} GiB free"
    if not folder.is_writable or folder.free_bytes < needs.staged_bytes + GIB:
        return found("staging", text=text)
    return ok(text)


def folders(seen: Sequence[FolderFacts], facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the folders for caches, temporary files and logs are writable and have room."""
    return worst(map(_folder, seen)) if seen else not_checked("the folders were not looked at")


def _folder(folder: FolderFacts) -> Seen:
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


def limits(seen: Mapping[str, LimitFacts], facts: NodeFacts, needs: Needs) -> Seen:
    """Limits on locked memory, open files, processes and the size of one, and on tasks of the job's cgroup."""
    return worst(_limit(name, limit, facts, needs) for name, limit in seen.items())


def _limit(name: str, limit: LimitFacts, facts: NodeFacts, needs: Needs) -> Seen:
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


def commands(seen: SoftwareFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """Check that the engine's command, and Ray's, are in the node's environment, and that this vLLM has the options."""
    if seen.missing_commands:
        return found("no command", names=" and ".join(seen.missing_commands))
    installed = seen.versions.get("vllm", "")
    if installed and not is_known(installed):
        return found("unknown version", installed=installed, nearest=nearest_version(installed))
    if installed and (lacking := dict(options_of_others(needs.engine_words, installed))):
        owners = ", ".join(sorted(set(lacking.values())))
        return found("no option", installed=installed, options=", ".join(lacking), owners=owners)
    return ok(", ".join(f"{name} {version}" for name, version in seen.versions.items()))


def paths(seen: SoftwareFacts, facts: NodeFacts, needs: Needs) -> Seen:
    """UNIX sockets below the folder for temporary files have paths that the kernel takes."""
    length = len(seen.socket_folder) + _SOCKET_NAME
    text = f"sockets in {seen.socket_folder} have {length} characters, {_SOCKET_PATH} are allowed"
    return found("long path", text=text) if length > _SOCKET_PATH else ok(text)
