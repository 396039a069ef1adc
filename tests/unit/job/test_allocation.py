"""What the scheduler gave a node, read from its environment as several Slurm versions and sites set it."""

from __future__ import annotations

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.units import GIB

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "64",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_MEM_PER_NODE": "1024",
}


def test_a_slurm_task_knows_its_place_and_its_share():
    here = read_allocation(SLURM)
    assert (here.cluster, here.job_id, here.node_rank, here.num_nodes, here.node_name) == ("slurm", "77", 1, 2, "n2")
    assert (here.num_cpus, here.num_gpus, here.memory_bytes) == (64, 8, GIB)
    assert not here.is_head
    assert here.run_name == "77-r0"


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"SLURM_RESTART_COUNT": "2"}, "run_name", "77-r2"),
        ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4"}, "job_id", "70_4"),
        ({"SLURM_GPUS_ON_NODE": "h100:4"}, "num_gpus", 4),
        ({"SLURM_GPUS_ON_NODE": "", "CUDA_VISIBLE_DEVICES": "0,3"}, "num_gpus", 2),
        ({"SLURM_GPUS_ON_NODE": ""}, "num_gpus", None),
        ({"SLURM_MEM_PER_NODE": "0"}, "memory_bytes", None),
        ({"SLURM_MEM_PER_NODE": "", "SLURM_MEM_PER_CPU": "16"}, "memory_bytes", GIB),
    ],
)
def test_what_sites_say_differently(changes, field, value):
    assert getattr(read_allocation({**SLURM, **changes}), field) == value


def test_a_local_run_inside_a_job_is_local():
    here = read_allocation({**SLURM, "HPC_SERVE_CLUSTER": "local", "HPC_SERVE_JOB_ID": "local-5"})
    assert (here.cluster, here.job_id, here.num_nodes, here.is_head) == ("local", "local-5", 1, True)


def test_outside_a_job_it_says_what_to_do():
    with pytest.raises(InvalidRequestError, match="submit a script"):
        read_allocation({})
