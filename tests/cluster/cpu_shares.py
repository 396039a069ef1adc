"""The same share of a core for every node of a cluster, by a cgroup of its own with a quota.

All hosts of a test cluster share this machine's cores: of sixteen nodes each has an eighth of what each of two has.
With a quota each has as much whatever their number. What a job starts inherits its slurmd's cgroup, and linuxproc
leaves it there. The login node, with Slurm's controller, and who enters a host from outside are not limited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster.cluster import SlurmCluster, wait_for

# A process that has used up its quota stands still until the next period. With the kernel's usual 100 ms a tenth of a
# core would be 10 ms of work and 90 ms of silence, which a start of many short steps sees as latency.
PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000  # the kernel takes no less
_EMPTY_WITHIN_S = 60.0


class NoCpuControllerError(Exception):
    """Processes cannot be given a share of a core here. The text says why."""


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Where cgroups are made: CPU time is limited in one tree and counted in one, of version 1 perhaps another."""

    version: int
    limits: Path
    counts: Path | None

    def limit_lines(self, cores: float | None) -> list[tuple[str, str]]:
        """What is written, in this order, to limit a group to so many cores; None: as many as there are.

        >>> Controller(version=2, limits=Path("/cg"), counts=None).limit_lines(0.125)
        [('cpu.max', '1250 10000')]
        """
        period_us = PERIOD_US if cores is None else max(PERIOD_US, round(_LEAST_QUOTA_US / cores))
        quota_us = None if cores is None else round(period_us * cores)
        if self.version == 2:
            return [("cpu.max", f"{quota_us or 'max'} {period_us}")]
        lines = [("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", str(period_us))]
        return lines if quota_us is None else [*lines, ("cpu.cfs_quota_us", str(quota_us))]

    @property
    def trees(self) -> tuple[Path, ...]:
        both = (self.limits, self.counts) if self.counts is not None else (self.limits,)
        return tuple(dict.fromkeys(both))


def find_controller(mounts: str) -> Controller | None:
    """The cpu controller by the text of /proc/mounts, or None. Version 2 counts what it limits."""
    by_name: dict[str, Path] = {}
    for line in mounts.splitlines():
        _, folder, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            by_name |= {name: Path(folder) for name in options.split(",") if name in ("cpu", "cpuacct")}
        elif kind == "cgroup2" and _has_cpu(Path(folder)):
            return Controller(version=2, limits=Path(folder), counts=Path(folder))
    if "cpu" not in by_name:
        return None
    return Controller(version=1, limits=by_name["cpu"], counts=by_name.get("cpuacct"))


def _has_cpu(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return "cpu" in (folder / "cgroup.controllers").read_text().split()
    return False


class CpuShares:
    """The groups of a cluster's nodes. Made while the nodes are idle: each node's slurmd is moved into its own."""

    def __init__(self, cluster: SlurmCluster, controller: Controller) -> None:
        self._cluster, self._controller = cluster, controller

    def limit(self, cores: float | None) -> None:
        """Give every node so many cores; None: all there are."""
        for node in self._cluster.nodes:
            for name, text in self._controller.limit_lines(cores):
                (self._group(self._controller.limits, node) / name).write_text(text)

    def used_s(self) -> Mapping[str, float]:
        """Seconds of CPU that each node has used so far; empty where the kernel does not count them."""
        counts = self._controller.counts
        if counts is None:
            return {}
        return {node: self._used_s(self._group(counts, node)) for node in self._cluster.nodes}

    def _used_s(self, group: Path) -> float:
        if self._controller.version == 1:
            return int((group / "cpuacct.usage").read_text()) / 1e9
        fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    @property
    def groups(self) -> list[Path]:
        """The folders of all groups, in each tree."""
        nodes = [self._group(tree, node) for tree in self._controller.trees for node in self._cluster.nodes]
        return [*nodes, *(tree / self._name for tree in self._controller.trees)]

    @property
    def _name(self) -> str:
        return f"hpc-serve-{self._cluster.config.name}"

    def _group(self, tree: Path, node: str) -> Path:
        return tree / self._name / node

    def make(self) -> None:
        """Raises NoCpuControllerError where groups cannot be made or limited."""
        try:
            for tree in self._controller.trees:
                for parent in (tree, tree / self._name):
                    parent.mkdir(exist_ok=True)
                    if self._controller.version == 2:
                        (parent / "cgroup.subtree_control").write_text("+cpu")
                for node in self._cluster.nodes:
                    self._group(tree, node).mkdir(exist_ok=True)
            self.limit(None)
        except OSError as error:
            raise NoCpuControllerError(f"no share of a core can be set: {error}") from None
        for node in self._cluster.nodes:
            wait_for(partial(self._move_in, node), _EMPTY_WITHIN_S, what=f"all of {node} to be in its cgroup")

    def _move_in(self, node: str) -> bool:
        """Moves what runs on the node; whether nothing was left to move."""
        outside = [pid for pid in self._cluster.pids_on(node) if self.holds(pid, node) is False]
        for tree in self._controller.trees:
            _move(outside, self._group(tree, node))
        return not outside

    def holds(self, pid: int, node: str) -> bool | None:
        """Whether a process is in the node's group, of each tree; None if it has ended."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            return None
        ours = [line for line in lines if line.split(":", 2)[2].endswith(f"/{self._name}/{node}")]
        return len(ours) == len(self._controller.trees)

    def remove(self) -> None:
        """Let everything run in the tree's own group again, and remove those of the nodes."""
        for tree in self._controller.trees:
            for node in self._cluster.nodes:
                group = self._group(tree, node)
                wait_for(partial(_emptied, group, tree), _EMPTY_WITHIN_S, what=f"{group} to end")
            with contextlib.suppress(FileNotFoundError):
                (tree / self._name).rmdir()


def _move(pids: list[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _emptied(group: Path, into: Path) -> bool:
    """Whether the group is gone. Its processes are moved out of it first."""
    try:
        _move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], into)
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # not empty yet
        return False
    return True


@contextlib.contextmanager
def cpu_shares(cluster: SlurmCluster) -> Iterator[CpuShares]:
    """Groups for the nodes of a cluster that is up and idle, not limited yet. Raises NoCpuControllerError."""
    controller = find_controller(Path("/proc/mounts").read_text())
    if controller is None:
        raise NoCpuControllerError("no share of a core can be set: the cpu controller of cgroups is not mounted")
    shares = CpuShares(cluster, controller)
    try:
        shares.make()
        yield shares
    finally:
        shares.remove()
