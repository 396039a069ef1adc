"""A node's memory, its folders' room, and the limits of this process. Read from /proc, cgroups and the filesystem."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpc_serve.job.preflight.facts import FolderFacts, LimitFacts, MemoryFacts

_SHM = "/dev/shm"
_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "as": resource.RLIMIT_AS,
}
_KIB = 1024


def gather_memory() -> MemoryFacts:
    """Memory, shared memory, and what the cgroup allows. Raises OSError, ValueError."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    meminfo = {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) > 1}
    cgroups = own_cgroups(Path("/proc/self/cgroup").read_text())
    limit, used = _least_limit(cgroups, "memory", ("memory.max", "memory.current"))
    if limit is None:
        limit, used = _least_limit(cgroups, "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    tasks_limit, tasks = _least_limit(cgroups, "pids", ("pids.max", "pids.current"))
    total = meminfo["MemTotal"]
    is_limited = limit is not None and limit < total
    try:
        shm = os.statvfs(_SHM)
        sizes = (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize)
    except OSError:
        sizes = (0, 0)
    return MemoryFacts(
        total_bytes=total,
        available_bytes=meminfo.get("MemAvailable", total),
        limit_bytes=limit if is_limited else None,
        used_of_limit_bytes=used if is_limited else None,
        shm_bytes=sizes[0],
        shm_free_bytes=sizes[1],
        shm_is_writable=os.access(_SHM, os.W_OK | os.X_OK),
        tasks_limit=tasks_limit,
        tasks=tasks,
    )


def own_cgroups(text: str, root: Path = Path("/sys/fs/cgroup")) -> dict[str, list[Path]]:
    """The folders of this process's cgroup and those above it, by controller; "" for those of version 2."""
    found: dict[str, list[Path]] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            top = root / controller if controller else root
            folder = top / path.lstrip("/")
            found[controller] = [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    return found


def _least_limit(
    cgroups: Mapping[str, list[Path]], controller: str, files: tuple[str, str]
) -> tuple[int | None, int | None]:
    """The least limit of a cgroup or one above it, and what is used of it; None without one."""
    found: list[tuple[int, int]] = []
    for folder in [*cgroups.get(controller, ()), *cgroups.get("", ())]:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            found.append((int((folder / files[0]).read_text()), int((folder / files[1]).read_text())))
    return min(found, default=(None, None))


def gather_folders(folders: Mapping[str, str]) -> tuple[FolderFacts, ...]:
    """The room in each folder, by its purpose."""
    return tuple(_folder(purpose, Path(path)) for purpose, path in folders.items())


def _folder(purpose: str, path: Path) -> FolderFacts:
    existing = next((one for one in (path, *path.parents) if one.exists()), path)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:  # a quota or a read-only mount shows at the first byte
            file.write(b"preflight")
            file.flush()
        is_writable = True
    except OSError:
        is_writable = False
    try:
        stat = os.statvfs(existing)
        room, files = stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None
    except OSError:
        return FolderFacts(purpose=purpose, path=str(path), is_writable=False, free_bytes=0)
    return FolderFacts(purpose=purpose, path=str(path), is_writable=is_writable, free_bytes=room, free_files=files)


def gather_limits() -> dict[str, LimitFacts]:
    """What `ulimit` shows of this process."""
    return {name: LimitFacts(soft=soft, hard=hard) for name, (soft, hard) in _read_limits().items()}


def _read_limits() -> dict[str, tuple[int, int]]:
    def whole(value: int) -> int:
        return -1 if value == resource.RLIM_INFINITY else value

    return {
        name: (whole(soft), whole(hard))
        for name, (soft, hard) in ((n, resource.getrlimit(i)) for n, i in _LIMITS.items())
    }
