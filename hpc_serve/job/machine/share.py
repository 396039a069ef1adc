"""One replica's share of a node that several replicas of a job divide evenly: its devices and its CPU cores.

Every step of a job sees all that the job has of the node. The launcher narrows it to its share, for itself and for all
that it starts. Devices keep the names that the scheduler gave them: indices, UUIDs, MIG instances.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_serve.errors import InvalidRequestError

_Item = TypeVar("_Item")
_ON_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Replica `index`, from 0, of the `count` replicas of a job."""

    index: int = 0
    count: int = 1

    @classmethod
    def from_text(cls, text: str) -> Share:
        """Read the share from the script's text, as `2/4`. Raises InvalidRequestError."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise InvalidRequestError(f"--replica {text}: write it as 2/4, the third of four replicas of a job.")
        return cls(index=int(found[1]), count=int(found[2]))

    def of(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Return an equal part of `items`, next to one another. A remainder of the division stays unused.

        >>> [Share(index=index, count=3).of("abcdefgh") for index in range(3)]
        ['ab', 'cd', 'ef']
        """
        size = len(items) // self.count
        return items[self.index * size : (self.index + 1) * size]

    def narrow_devices(self, environ: Mapping[str, str], *, needed: int) -> dict[str, str]:
        """Return `environ` with variables of visible devices that name this replica's devices alone.

        Raises InvalidRequestError if `needed` devices are wanted, and no variable lists the job's devices.
        """
        narrowed = dict(environ)
        if self.count == 1:
            return narrowed
        names = _variables(environ)
        if needed and not names:
            raise InvalidRequestError(
                f"{self.count} replicas of one job divide the GPUs that CUDA_VISIBLE_DEVICES lists (on AMD "
                "HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES), and none of them is set: Slurm sets it for GPUs that "
                "were asked for (--gpus-per-node, --gres); elsewhere export it in the script."
            )
        for name in names:
            narrowed[name] = ",".join(self.of([one.strip() for one in environ[name].split(",") if one.strip()]))
        return narrowed

    def take_cores(self) -> None:
        """Run this process, and all that it starts, on this replica's part of the cores that it may use.

        Nothing changes where there are fewer cores than replicas.
        """
        allowed = os.sched_getaffinity(0)
        if mine := self.of(near_one_another(allowed)):
            os.sched_setaffinity(0, mine)


def _variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables to narrow. HIP, and CUDA on ROCm, count within the devices of ROCR_VISIBLE_DEVICES. So
    ROCR_VISIBLE_DEVICES is narrowed only if it is set alone."""
    within = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if environ.get(name)]
    return within or (["ROCR_VISIBLE_DEVICES"] if environ.get("ROCR_VISIBLE_DEVICES") else [])


def near_one_another(cpus: Iterable[int], *, nodes: Path = _ON_NODES) -> list[int]:
    """CPUs by NUMA node, and threads of one core side by side."""
    node_of = _nodes_of_cpus(nodes)
    return sorted(cpus, key=lambda cpu: (node_of.get(cpu, (0, cpu)), cpu))


def _nodes_of_cpus(nodes: Path) -> dict[int, tuple[int, int]]:
    """By CPU: its NUMA node, and the first thread of its core."""
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        for cpu in folder.glob("cpu[0-9]*"):
            number = int(cpu.name.removeprefix("cpu"))
            try:
                siblings = (cpu / "topology" / "thread_siblings_list").read_text()
                first = int(re.split(r"[-,]", siblings.strip())[0])
            except (OSError, ValueError):
                first = number
            found[number] = (int(folder.name.removeprefix("node")), first)
    return found
