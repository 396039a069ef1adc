"""A node's memory, its folders' room, and the limits of this process. Read from /proc, cgroups and the filesystem."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_serve.job.machine.node_memory import (
    SHARED_MEMORY,
    least_limit,
    memory_limit,
    own_cgroups,
    read_meminfo,
    shared_memory_bytes,
)
from hpc_serve.job.preflight.facts import FolderFacts, LimitFacts, MemoryFacts
from hpc_serve.job.weights.weights_place import is_in_memory

_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "as": resource.RLIMIT_AS,
}


def gather_memory() -> MemoryFacts:
    """Memory, shared memory, and what the cgroup allows. Raises OSError, ValueError."""
    meminfo = read_meminfo()
    cgroups = own_cgroups(Path("/proc/self/cgroup").read_text())
    limit, used, _ = memory_limit(cgroups)
    shm_bytes, shm_free_bytes = shared_memory_bytes()
    return MemoryFacts(
        total_bytes=meminfo["MemTotal"],
        limit_bytes=limit,
        used_of_limit_bytes=used,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        shm_is_writable=os.access(SHARED_MEMORY, os.W_OK | os.X_OK),
    )


def gather_folders(folders: Mapping[str, str]) -> tuple[FolderFacts, ...]:
    """Return the room in each folder, by its purpose."""
    return tuple(_folder(purpose, Path(path)) for purpose, path in folders.items())


def _folder(purpose: str, path: Path) -> FolderFacts:
    existing = next((one for one in (path, *path.parents) if one.exists()), path)
    found = FolderFacts(purpose=purpose, path=str(path), is_in_memory=is_in_memory(existing))
    with contextlib.suppress(OSError):
        stat = os.statvfs(existing)
        free_files = stat.f_favail if stat.f_files else None
        found = replace(found, free_bytes=stat.f_bavail * stat.f_frsize, free_files=free_files)
        with tempfile.TemporaryFile(dir=existing) as file:  # a quota or a read-only mount shows at the first byte
            file.write(b"preflight")
            file.flush()
        found = replace(found, is_writable=True)
    return found


def gather_limits() -> dict[str, LimitFacts]:
    """Return the limits of this process, as `ulimit` shows them, and that of its cgroup on tasks. Raises OSError."""
    found = {name: resource.getrlimit(number) for name, number in _LIMITS.items()}  # -1: unlimited
    limits = {name: LimitFacts(soft=soft, hard=hard) for name, (soft, hard) in found.items()}
    if os.geteuid() != 0 and limits["nproc"].soft >= 0:  # the kernel holds root to none
        limits["nproc"] = replace(limits["nproc"], used=count_tasks(os.geteuid()))
    most, used = least_limit(own_cgroups(Path("/proc/self/cgroup").read_text()), "pids", ("pids.max", "pids.current"))
    of_cgroup = LimitFacts(soft=-1, hard=-1) if most is None else LimitFacts(soft=most, hard=most, used=used or 0)
    return {"tasks": of_cgroup, **limits}


def count_tasks(user_id: int, proc: Path = Path("/proc")) -> int:
    """Return how many processes and threads a user has on this node, which `ulimit -u` bounds together."""
    count = 0
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if entry.stat().st_uid == user_id:
                    count += len(os.listdir(entry / "task"))
    return count
