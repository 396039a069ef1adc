"""The scheduler's allocation on this node: its rank, the number of nodes, and the CPUs, GPUs and memory it may use.

It is read once from the environment; only this module knows Slurm's variables inside a job. A local run has one node
and takes its limits from the machine. Every step of a job sees all that the job has of the node. The launcher of one
of several replicas narrows that to an equal part (`Share`), for itself and for all that it starts. Devices keep the
names that the scheduler gave them: indices, UUIDs, MIG instances.

The log of the programs inside a job names the node, so it is set up here. Each module decides what it logs.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypeVar

from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.fields import record_file_name, run_name
from hpc_serve.units import MIB

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


_ALL = Share()


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One node's part of a job; this replica has `share` of it.

    CPUs, GPUs and memory are the replica's. `num_gpus` and `memory_bytes` are None where the scheduler does not say.
    """

    cluster: str
    job_id: str
    restart: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    node_name: str
    num_cpus: int
    num_gpus: int | None = None
    memory_bytes: int | None = None
    share: Share = _ALL

    @property
    def is_head(self) -> bool:
        return self.node_rank == 0

    @property
    def run_name(self) -> str:
        """Return the name of this replica's run of the job. A requeued job runs again under the same id."""
        return run_name(self.job_id, self.restart, self.share.index)

    @property
    def record_name(self) -> str:
        """Return the file name of this replica's record."""
        return record_file_name(self.job_id, self.restart, self.share.index)


def read_allocation(environ: Mapping[str, str], share: Share = _ALL) -> Allocation:
    """Return a replica's allocation on this node. Raises InvalidRequestError outside a Slurm job and a local run."""
    node = _local(environ) if environ.get("HPC_SERVE_CLUSTER") == "local" else _slurm(environ)
    return replace(
        node,
        share=share,
        num_cpus=max(1, node.num_cpus // share.count),
        num_gpus=None if node.num_gpus is None else node.num_gpus // share.count,
        memory_bytes=None if node.memory_bytes is None else node.memory_bytes // share.count,
    )


def _slurm(environ: Mapping[str, str]) -> Allocation:
    if not {"SLURM_JOB_ID", "SLURMD_NODENAME"} <= environ.keys():  # salloc's shell has the former alone
        raise InvalidRequestError(
            "This program runs on a node of a job: submit a script (hpc-serve submit, or sbatch; within salloc: "
            "srun --ntasks=1 --overlap bash SCRIPT), or set HPC_SERVE_CLUSTER=local and HPC_SERVE_JOB_ID."
        )
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return Allocation(
        cluster="slurm",
        job_id=f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"],
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node_rank=int(environ.get("SLURM_NODEID") or 0),
        num_nodes=int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1),
        node_name=_node_name(environ),
        num_cpus=int(environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))),
        num_gpus=_slurm_gpus(environ),
        memory_bytes=_slurm_memory_bytes(environ),
    )


def _node_name(environ: Mapping[str, str]) -> str:
    """Slurm's name of this node, else its host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _local(environ: Mapping[str, str]) -> Allocation:
    return Allocation(
        cluster="local",
        job_id=environ.get("HPC_SERVE_JOB_ID") or f"local-{os.getppid()}",
        node_name=socket.gethostname(),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def _slurm_gpus(environ: Mapping[str, str]) -> int | None:
    count = environ.get("SLURM_GPUS_ON_NODE")
    if count and (match := re.search(r"\d+$", count)):  # "8", on some versions "h100:8"
        return int(match.group())
    visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else None


def _slurm_memory_bytes(environ: Mapping[str, str]) -> int | None:
    if per_node := int(environ.get("SLURM_MEM_PER_NODE") or 0):
        return per_node * MIB
    if per_cpu := int(environ.get("SLURM_MEM_PER_CPU") or 0):
        return per_cpu * int(environ.get("SLURM_CPUS_ON_NODE") or 1) * MIB
    return None


# -- the log of this process


def set_up_logging(stream: TextIO) -> None:
    """Write what hpc-serve logs in this process to `stream`, from level INFO on."""
    handler = logging.StreamHandler(stream)
    words, node = "%(asctime)s %(node)s %(levelname)s hpc-serve: %(message)s", _node_name(os.environ)
    handler.setFormatter(logging.Formatter(words, datefmt="%Y-%m-%d %H:%M:%S", defaults={"node": node}))
    logger = logging.getLogger("hpc_serve")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def print_line(line: str) -> None:
    """Print a line of a child unchanged."""
    print(line, flush=True)
