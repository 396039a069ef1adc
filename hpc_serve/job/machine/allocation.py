"""The scheduler's allocation on this node: its rank, the number of nodes, and the CPUs, GPUs and memory it may use.

It is read once from the environment. If a job has several replicas, each has an equal part (`share`). Only this module
knows Slurm's variables inside a job. A local run has one node and takes its limits from the machine.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine.share import Share
from hpc_serve.rendezvous.names import record_file_name, run_name
from hpc_serve.sizes import MIB

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
    if "SLURM_JOB_ID" not in environ:
        raise InvalidRequestError(
            "This program runs inside a job: submit a script (hpc-serve submit, or sbatch), "
            "or set HPC_SERVE_CLUSTER=local and HPC_SERVE_JOB_ID."
        )
    return Allocation(
        cluster="slurm",
        job_id=slurm_job_id(environ),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        node_rank=int(environ.get("SLURM_NODEID") or 0),
        num_nodes=int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1),
        node_name=node_name(environ),
        num_cpus=int(environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))),
        num_gpus=_slurm_gpus(environ),
        memory_bytes=_slurm_memory_bytes(environ),
    )


def node_name(environ: Mapping[str, str]) -> str:
    """Slurm's name of this node, else its host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """`123`, or `123_4` for a task of an array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


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
