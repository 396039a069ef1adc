"""Several replicas in one job with real vLLM: four engines of two ranks on a node of eight GPUs, and two of four.

The node's GPUs are declared, the ranks run on CPUs, and tiny models take the place of the weights; all else is what a
user runs. Sixteen processes of vLLM share this machine's cores, and take 7 GB: `make real-replicas` runs these tests,
`make test` skips them. What needs no real engine is in test_replicas_per_job.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.cluster.processes import variable_of
from tests.e2e.jobs import BUSY, ENDS_WITHIN_S, REAL_REPLICAS, Record, User

pytestmark = REAL_REPLICAS

ASK_EACH = Path(__file__).with_name("ask_each.py")
START_S = 1_200.0
DEVICE_LISTS = {4: {"0,1", "2,3", "4,5", "6,7"}, 2: {"0,1,2,3", "4,5,6,7"}}


@pytest.fixture
def alice_variables():
    return BUSY


def ranks(alice: User) -> dict[str, list[int]]:
    """The processes of vLLM's ranks, by the devices that they see."""
    found = defaultdict(list)
    for process in alice.processes():
        if process.argv[0].startswith("VLLM::Worker"):
            found[variable_of(process.pid, "CUDA_VISIBLE_DEVICES")].append(process.pid)
    return dict(found)


def check_cores(workers: dict[str, list[int]]) -> None:
    """Each replica has cores of its own, where there are enough for all."""
    cores = [{frozenset(os.sched_getaffinity(pid)) for pid in pids} for pids in workers.values()]
    assert all(len(of_replica) == 1 for of_replica in cores), cores
    every = [next(iter(of_replica)) for of_replica in cores]
    here = os.sched_getaffinity(0)
    if len(here) < len(workers):
        assert set(every) == {frozenset(here)}
    else:
        assert sum(map(len, every)) == len(frozenset().union(*every)), every


@pytest.mark.parametrize(("model", "count", "ranks_each"), [("8b", 4, 2), ("70b", 2, 4)])
def test_real_engines_divide_a_node(alice, tiny_models, show_table, model, count, ranks_each):
    alice = User(alice.cluster, {**alice.environ, "HPC_SERVE_MODEL": str(tiny_models / model)})
    told = json.loads(alice.hpc_serve_said("submit", model, "--replicas-per-job", str(count), "--json"))
    job = told["job_id"]
    assert [one["name"] for one in told["replicas"]] == [f"{job}-{replica}" for replica in range(count)]
    waited = alice.hpc_serve(
        *("wait", model, "--replicas", str(count), "--timeout", f"{START_S:.0f}s"), timeout=START_S + 60
    )
    assert waited.returncode == 0, waited.stdout + waited.stderr + alice.log(model, job)
    wait_for(
        lambda: f"{model}: {count}/{count} replicas ready" in alice.hpc_serve_said("status"),
        ENDS_WITHIN_S,
        what="an answer of each to `status`",
    )

    found = alice.records(model, job)
    assert [one["replica"] for one in found] == list(range(count))
    assert {
        (one["state"], one["tensor_parallel_size"], one["gpus_per_node"], one["engine_restarts"]) for one in found
    } == {("ready", ranks_each, ranks_each, 0)}
    assert len({one["nodes"][0]["name"] for one in found}) == 1
    assert len({one["port"] for one in found}) == count
    workers = ranks(alice)
    assert {devices: len(pids) for devices, pids in workers.items()} == dict.fromkeys(DEVICE_LISTS[count], ranks_each)
    check_cores(workers)

    asked = alice.run(sys.executable, str(ASK_EACH), model, str(count), timeout=START_S)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    got = json.loads(asked.stdout.splitlines()[-1])
    names = {f"{job}-r0-{replica}" for replica in range(count)}
    assert set(got["texts"]) == names
    assert len(set(got["texts"].values())) == 1, got["texts"]
    assert got["texts"][f"{job}-r0-0"].split()
    assert len(set(got["replicas"].values())) == count

    said = alice.hpc_serve_said("stop", model)
    assert all(f"{model} (job {job}-{replica}) is over: stopped" in said for replica in range(count)), said
    alice.wait_until_gone(job)
    assert {one["state"] for one in alice.records(model, job)} == {"stopped"}
    assert not list((alice.home / ".hpc-serve").glob("jobs/*"))
    for node in alice.cluster.nodes:
        left = alice.run("sh", "-c", "ls -d /tmp/hs-* /dev/shm/* 2>/dev/null", node=node)
        assert left.stdout == ""
    show_table(_table(found, got["answered"]))


def _table(found: list[Record], answered: dict[str, int]) -> str:
    """What docs/guides/stay.md quotes."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    lines = [
        f"{one['measured']['start_s']:.0f} s to ready, {answered.get(_name(one), 0)} further answers" for one in found
    ]
    return "\n".join([*(f"{_name(one)}: {line}" for one, line in zip(found, lines, strict=True)), f"load {load}"])


def _name(record: Record) -> str:
    return f"{record['job_id']}-r{record['restart']}-{record['replica']}"
