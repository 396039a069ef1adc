"""Several replicas in one job on a real Slurm: each has its own part of the node, and ends alone.

The engine is the stub, put in vLLM's place by the environment that scripts activate. A node's eight GPUs are declared.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.cluster.processes import variable_of
from tests.e2e.jobs import STUB, User, result_of

pytestmark = [pytest.mark.slurm]

MOST_S = 300.0


@pytest.fixture
def alice_variables(stub_env):
    return {**stub_env, "STUB_ENGINE_ARGS": "--stub-words 40 --stub-word-s 0.25"}


def states(alice: User, job: str) -> list[str]:
    return [one["state"] for one in alice.records("8b", job)]


def engines(alice: User) -> dict[str | None, int]:
    """The stub engines of the cluster, by the devices that they see."""
    pids = (process.pid for process in alice.processes() if str(STUB) in process.argv[:2])
    return {variable_of(pid, "CUDA_VISIBLE_DEVICES"): pid for pid in pids}


def test_four_engines_divide_a_node_and_end_one_by_one(alice):
    told = json.loads(
        alice.hpc_serve_said(
            "submit", "8b", "--replicas-per-job", "4", "--engine-restarts", "0", "--mem", "8G", "--json"
        )
    )
    job = told["job_id"]
    names = [f"{job}-{replica}" for replica in range(4)]
    assert [one["name"] for one in told["replicas"]] == names
    alice.hpc_serve_said("wait", "8b", "--replicas", "4", "--timeout", "5m")
    wait_for(  # `status` asks all anew: one that is slow to answer now is asked again
        lambda: "8b: 4/4 replicas ready" in alice.hpc_serve_said("status"), MOST_S, what="all four"
    )
    shown = alice.hpc_serve_said("status")
    assert all(name in shown for name in names)
    assert set(engines(alice)) == {"0,1", "2,3", "4,5", "6,7"}
    logs = alice.hpc_serve_said("logs", f"{job}-2", "--files").split()
    assert [Path(path).name for path in logs] == [f"{job}.log", f"{job}-2-node0.log"]

    # One dies for good: the others serve.
    os.kill(engines(alice)["2,3"], signal.SIGKILL)
    wait_for(lambda: states(alice, job) == ["ready", "failed", "ready", "ready"], 180, what="the end of the second")

    # Another is stopped while each has streams under way: none is lost.
    program = alice.begin_streams("8b", 12)
    assert f"8b (job {job}-3) is over: stopped" in alice.hpc_serve_said("stop", f"{job}-3")
    assert set(engines(alice)) == {"0,1", "4,5"}
    found = json.loads(alice.hpc_serve_said("status", job, "--json"))["services"]
    by_name = {one["name"]: one["state"] for one in found}
    assert by_name == dict(zip(names, ("ready", "failed", "ready", "stopped"), strict=True))

    alice.hpc_serve_said("stop", "8b")
    assert result_of(program)["streams"] == [[40, "stop"]] * 12
    alice.wait_until_gone(job)
    assert states(alice, job) == ["stopped", "failed", "stopped", "stopped"]
    shown = alice.run("scontrol", "--oneliner", "show", "job", job).stdout
    assert " ExitCode=137:0 " in shown  # of the one that failed
    folder = alice.home / ".hpc-serve"
    assert not list(folder.glob("jobs/*"))
    assert not list(folder.glob("services/8b/*.drain"))
    for node in alice.cluster.nodes:
        assert "hs-" not in alice.run("ls", "/tmp", node=node).stdout
