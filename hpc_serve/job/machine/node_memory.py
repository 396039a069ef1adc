"""The memory of this node, and what the cgroups of this process leave of it. Read from /proc and /sys/fs/cgroup."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

_KIB = 1024
_LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)  # versions 2 and 1


def available_memory() -> int:
    """Bytes of memory that this job may still use. Raises OSError, ValueError."""
    meminfo = read_meminfo()
    available = meminfo.get("MemAvailable", meminfo["MemTotal"])
    limit, used = memory_limit(own_cgroups(Path("/proc/self/cgroup").read_text()))
    return available if limit is None else min(available, max(0, limit - (used or 0)))


def read_meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """/proc/meminfo, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * _KIB for words in lines if len(words) > 1}


def memory_limit(cgroups: Mapping[str, list[Path]]) -> tuple[int | None, int | None]:
    """Return the least limit of memory of these cgroups, and what is used of it; None without one."""
    found = (least_limit(cgroups, "memory", files) for files in _LIMIT_FILES)
    return next((pair for pair in found if pair[0] is not None), (None, None))


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


def least_limit(
    cgroups: Mapping[str, list[Path]], controller: str, files: tuple[str, str]
) -> tuple[int | None, int | None]:
    """Return the least limit of a cgroup or one above it, and what is used of it; None without one."""
    found: list[tuple[int, int]] = []
    for folder in [*cgroups.get(controller, ()), *cgroups.get("", ())]:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            found.append((int((folder / files[0]).read_text()), int((folder / files[1]).read_text())))
    return min(found, default=(None, None))
