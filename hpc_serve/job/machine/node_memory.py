"""The memory of this node, what this process's cgroups leave of it, and what the kernel has killed for want of it.

Read from /proc and /sys/fs/cgroup. The kernel counts its kills in this job's cgroup, and on the whole node. A launcher
is in its job's cgroup, so the count exists as long as the launcher. Slurm's own word (OUT_OF_MEMORY) comes only after
the job, and not from every site. `parts` decides which end of the run the counts explain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.units import number_of, readable_size

_log = logging.getLogger(__name__)
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
        numbers = tuple(read_number(folder / name) for name in files)
        if numbers[0] is not None:
            found.setdefault(numbers[0], numbers)
    return found[min(found)] if found else (None,) * len(files)


def read_number(file: Path) -> int | None:
    """Return the number in a file of the kernel's; None if it has none, as "max"."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


# -- processes that the kernel has killed

_EVERY_S = 1.0
# Seconds; the run survived a kill that came longer before its end.
_BELONGS_TO_END_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OomCounts:
    """How many processes the kernel has killed for memory so far; None where it does not count them.

    `in_cgroup` counts kills in this process's own cgroup. `on_node` counts all kills on the node, also of other jobs.
    `limit_bytes` is the cgroup's limit, and `most_bytes` the most that it has used.
    """

    in_cgroup: int | None = None
    on_node: int | None = None
    limit_bytes: int | None = None
    most_bytes: int | None = None


class OomWatch:
    """Tells what has been killed on node `name` since it was made."""

    def __init__(self, name: str, read: Callable[[], OomCounts] | None = None) -> None:
        self._name, self._read = name, read or read_counts
        self._before = self._read()
        self._told: list[tuple[float, str]] = []

    async def run(self) -> None:
        """Look every second, and log what is new, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.look()

    def look(self) -> None:
        """Log what the kernel has killed in the job's cgroup since the last look."""
        now = self._read()
        if count := _more(now.in_cgroup, self._before.in_cgroup):
            words = _of_job(count, self._name, now)
            _log.warning("%s", words)
            self._told.append((time.monotonic(), words))
            others = (self._before.on_node or 0) + count  # the node's count has them too
            self._before = OomCounts(in_cgroup=now.in_cgroup, on_node=others)

    def words_of_end(self, *, by_sigkill: bool, is_silent: bool) -> str:
        """Explain a part's end just now by the counts; "" if they say nothing.

        `is_silent`: the part's log does not say why it ended. `by_sigkill`: the end was SIGKILL for sure.
        """
        self.look()
        told = [words for at, words in self._told if time.monotonic() - at < _BELONGS_TO_END_S]
        self._told.clear()
        now, before = self._read(), self._before
        self._before = now
        if told:
            return told[-1]
        if not is_silent or now.on_node is None:
            return ""
        if count := _more(now.on_node, before.on_node):
            killed = number_of(count, "process", "processes")
            return (
                f"the kernel has killed {killed} on {self._name} for memory meanwhile: the node had none left, or "
                "another job reached its limit"
            )
        who = "another program or a person sent SIGKILL"
        if not by_sigkill:
            who = "another program or a person killed it, unless it ended itself"
        return f"the kernel has killed none for memory on {self._name}: {who}"


def read_counts(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> OomCounts:
    """Return the counts now. A count that cannot be read is None."""
    try:
        cgroups = own_cgroups((proc / "self" / "cgroup").read_text(), root)
        total = read_meminfo(proc / "meminfo")["MemTotal"]
    except (OSError, ValueError, KeyError):
        return OomCounts()
    counts = OomCounts(in_cgroup=_cgroup_kills(cgroups), on_node=_field(proc / "vmstat", "oom_kill"))
    limit, _, most = memory_limit(cgroups)
    return counts if limit is None or limit >= total else replace(counts, limit_bytes=limit, most_bytes=most)


def _cgroup_kills(cgroups: Mapping[str, Iterable[Path]]) -> int | None:
    """Return the count of the innermost cgroup that has one: the kernel counts a kill in the process's cgroup."""
    files = [
        *(folder / "memory.oom_control" for folder in cgroups.get("memory", ())),
        *(folder / "memory.events" for folder in cgroups.get("", ())),
    ]
    counts = (_field(file, "oom_kill") for file in files)
    return next((count for count in counts if count is not None), None)


def _field(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _more(now: int | None, before: int | None) -> int:
    return max(0, now - before) if now is not None and before is not None else 0


def _of_job(count: int, node: str, seen: OomCounts) -> str:
    words = f"the kernel has killed {number_of(count, 'process', 'processes')} of this job on {node} for memory"
    if seen.limit_bytes is None:
        return f"{words}: the node had none left"
    most = f", and {readable_size(seen.most_bytes)} were used" if seen.most_bytes is not None else ""
    return f"{words}: its cgroup allows {readable_size(seen.limit_bytes)}{most}"
