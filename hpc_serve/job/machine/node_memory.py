"""The memory of this node, and what the cgroups of this process leave of it. Read from /proc and /sys/fs/cgroup."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
_KIB = 1024
# The limit, what is used of it, and the most that was; of versions 2 and 1.
_LIMIT_FILES = (
    ("memory.max", "memory.current", "memory.peak"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes of memory that this job may still use. Raises OSError, ValueError."""
    meminfo = read_meminfo()
    available = meminfo.get("MemAvailable", meminfo["MemTotal"])
    limit, used, _ = memory_limit(own_cgroups(Path("/proc/self/cgroup").read_text()))
    return available if limit is None else min(available, max(0, limit - (used or 0)))


def shared_memory_bytes() -> tuple[int, int]:
    """Return the size of the shared memory's filesystem, and what is free of it; zeros where there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def read_meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) > 1}


def memory_limit(cgroups: Mapping[str, list[Path]]) -> tuple[int | None, ...]:
    """Return the least limit of memory of these cgroups, what is used of it, and the most that was; each may be None.

    Older kernels do not keep the most.
    """
    found = (least_limit(cgroups, "memory", files) for files in _LIMIT_FILES)
    return next((numbers for numbers in found if numbers[0] is not None), (None, None, None))


def own_cgroups(text: str, root: Path = Path("/sys/fs/cgroup")) -> dict[str, list[Path]]:
    """Return the folders of this process's cgroup and those above it, by controller; "" for those of version 2."""
    found: dict[str, list[Path]] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            top = root / controller if controller else root
            folder = top / path.lstrip("/")
            found[controller] = [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    return found


def least_limit(cgroups: Mapping[str, list[Path]], controller: str, files: tuple[str, ...]) -> tuple[int | None, ...]:
    """Return the numbers in `files` of the cgroup with the least first number, of this or above; each may be None."""
    found: dict[int, tuple[int | None, ...]] = {}
    for folder in [*cgroups.get(controller, ()), *cgroups.get("", ())]:
        numbers = tuple(_number(folder / name) for name in files)
        if numbers[0] is not None:
            found.setdefault(numbers[0], numbers)
    return found[min(found)] if found else (None,) * len(files)


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is none
        return int(file.read_text())
    return None
