"""What the scheduler gave a node, read from its environment as several Slurm versions and sites set it."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.job.machine.allocation import Share, near_one_another, print_line, read_allocation, set_up_logging
from hpc_serve.job.run.node import LaunchOptions
from hpc_serve.units import GIB
from tests.support.nodes import ALLOCATION, make_node

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


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURMD_NODENAME"])
def test_a_shell_outside_a_job_and_that_of_salloc_on_a_login_node_have_no_part_of_a_node(missing):
    with pytest.raises(InvalidRequestError, match="runs on a node of a job"):
        read_allocation({name: value for name, value in SLURM.items() if name != missing})


def test_a_local_run_inside_a_job_is_local():
    here = read_allocation({**SLURM, "HPC_SERVE_CLUSTER": "local", "HPC_SERVE_JOB_ID": "local-5"})
    assert (here.cluster, here.job_id, here.num_nodes, here.is_head) == ("local", "local-5", 1, True)


# -- One replica's share of a node: devices by the names that the scheduler gave, cores near one another


UUIDS = "GPU-8d1f,GPU-0a2b,GPU-77cc,GPU-1234"
MIG = "MIG-aa/1/0, MIG-bb/2/0"
OF_ALL = {f"{maker}_VISIBLE_DEVICES": "0,1" for maker in ("ROCR", "CUDA", "HIP")}


@pytest.mark.parametrize(
    ("share", "given", "narrowed"),
    [
        ("0/4", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("3/4", {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ("1/2", {"CUDA_VISIBLE_DEVICES": "7,2,5,3"}, {"CUDA_VISIBLE_DEVICES": "5,3"}),
        ("1/2", {"CUDA_VISIBLE_DEVICES": UUIDS}, {"CUDA_VISIBLE_DEVICES": "GPU-77cc,GPU-1234"}),
        ("1/2", {"CUDA_VISIBLE_DEVICES": MIG}, {"CUDA_VISIBLE_DEVICES": "MIG-bb/2/0"}),
        ("1/2", {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, {"ROCR_VISIBLE_DEVICES": "6,7"}),
        ("1/2", {"HIP_VISIBLE_DEVICES": "0,1"}, {"HIP_VISIBLE_DEVICES": "1"}),
        # HIP's numbers count within what ROCR selects, so that selection stays.
        ("1/2", OF_ALL, {**OF_ALL, "CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        ("0/1", {"CUDA_VISIBLE_DEVICES": " 1 ,2"}, {"CUDA_VISIBLE_DEVICES": " 1 ,2"}),
    ],
)
def test_devices_keep_the_names_that_the_scheduler_gave_them(share, given, narrowed):
    environ = {**given, "PATH": "/bin"}
    assert Share.from_text(share).narrow_devices(environ, needed=1) == {**narrowed, "PATH": "/bin"}


def test_no_device_is_in_two_shares_and_none_that_they_can_divide_is_left_out():
    shares = [
        Share(index=index, count=3).narrow_devices({"CUDA_VISIBLE_DEVICES": UUIDS}, needed=1) for index in range(3)
    ]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == UUIDS.split(",")[:3]


def test_engines_on_cpus_need_no_devices():
    assert Share(index=1, count=2).narrow_devices({}, needed=0) == {}
    with pytest.raises(InvalidRequestError, match="none of them is set"):
        Share(index=1, count=2).narrow_devices({"CUDA_VISIBLE_DEVICES": ""}, needed=1)


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "1/2/3"])
def test_what_is_no_replica_of_a_job_is_refused(text):
    with pytest.raises(InvalidRequestError, match="write it as 2/4"):
        Share.from_text(text)


def test_cores_of_one_node_and_threads_of_one_core_are_near(tmp_path):
    """Two sockets of two cores of two threads, numbered as Linux does: the second threads come last."""
    for cpu in range(8):
        core = cpu % 4
        topology = tmp_path / f"node{core // 2}" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core},{core + 4}\n")
    cpus = near_one_another(range(8), nodes=tmp_path)
    assert cpus == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [Share(index=index, count=2).of(cpus) for index in range(2)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert near_one_another({9, 3, 5}, nodes=tmp_path / "none") == [3, 5, 9]


def test_a_replica_has_its_part_of_what_the_scheduler_gave():
    part = read_allocation(SLURM, Share(index=2, count=4))
    assert (part.num_cpus, part.num_gpus, part.memory_bytes) == (16, 2, GIB // 4)
    assert part.run_name == "77-r0-2"
    assert read_allocation({**SLURM, "SLURM_CPUS_ON_NODE": "2"}, Share(index=2, count=4)).num_cpus == 1


def test_a_process_takes_its_cores(monkeypatch):
    taken = []
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(100, 104)))
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cpus: taken.append(set(cpus)))
    Share(index=1, count=2).take_cores()
    Share(index=1, count=8).take_cores()  # fewer cores than replicas: they share all
    assert taken == [{102, 103}]


def test_fewer_gpus_than_the_script_says_are_told_of_each_replica(tmp_path: Path):
    allocation = replace(ALLOCATION, num_gpus=1, share=Share(index=1, count=2))
    options = LaunchOptions(service="8b", backend="mp", gpus_per_node=4)
    with pytest.raises(DoesNotFitError, match="n1 has 1 GPU for each of the 2 replicas of this job"):
        make_node(tmp_path, allocation=allocation, options=options).check_gpus()


# -- What the programs inside a job log: time, node and level stand before each message


@pytest.mark.parametrize("node", ["n1", "100%d"])
def test_a_line_has_time_node_and_level(monkeypatch, node):
    monkeypatch.setenv("SLURMD_NODENAME", node)
    stream = io.StringIO()
    set_up_logging(stream)
    logging.getLogger("hpc_serve.job.head").info("%s is ready", "8b")
    logging.getLogger("hpc_serve.job.head").debug("nobody asked")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {node} INFO hpc-serve: 8b is ready\n", stream.getvalue())


def test_set_up_twice_each_line_is_written_once():
    first, second = io.StringIO(), io.StringIO()
    set_up_logging(first)
    set_up_logging(second)
    logging.getLogger("hpc_serve.job").error("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)


def test_a_childs_line_stays_as_it_is(capsys):
    print_line("(EngineCore pid=1) INFO 11-21 10:00:00 [core.py:1] init")
    assert capsys.readouterr().out == "(EngineCore pid=1) INFO 11-21 10:00:00 [core.py:1] init\n"
