"""Several replicas of one service on a real Slurm: one array, found, waited for, more of them, fewer, none.

The engine is the stub, put in vLLM's place by the environment that scripts activate.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import SMALL, User, result_of

pytestmark = [pytest.mark.slurm]

MOST_S = 300.0


@pytest.fixture
def alice_variables(stub_env):
    return {**stub_env, "STUB_ENGINE_ARGS": "--stub-words 40 --stub-word-s 0.25"}


def states(alice: User, service: str) -> dict[str, str]:
    """By job, those that are not over."""
    found = json.loads(alice.hpc_serve_said("status", service, "--json"))["services"]
    return {one["job_id"]: one["state"] for one in found if one["state"] not in ("stopped", "failed")}


def wait_until_said(alice: User, wanted: str, *words: str) -> None:
    """`status` asks all replicas anew: one that is slow to answer now is asked again."""
    wait_for(lambda: wanted in alice.hpc_serve_said(*words), MOST_S, what=wanted)


def test_four_replicas_then_five_then_two_then_none(alice):
    told = json.loads(alice.hpc_serve_said("submit", "8b", "--replicas", "4", *SMALL, "--json"))
    array = told["job_id"]
    assert [one["job_id"] for one in told["replicas"]] == [f"{array}_{task}" for task in range(4)]
    assert "8b is ready with 4 replicas" in alice.hpc_serve_said("wait", "8b", "--replicas", "4", "--timeout", "5m")
    wait_until_said(alice, "8b: 4/4 replicas ready", "status")
    assert states(alice, "8b") == {f"{array}_{task}": "ready" for task in range(4)}
    logs = alice.hpc_serve_said("logs", f"{array}_2", "--files").split()
    assert [Path(path).name for path in logs] == [f"{array}_2.log", f"{array}_2-node0.log"]

    more = alice.hpc_serve_said("scale", "8b", "5")
    assert "8b has 5 replicas, it had 4." in more
    alice.hpc_serve_said("wait", "8b", "--replicas", "5", "--timeout", "5m")
    wait_until_said(alice, "8b: 5/5 replicas ready", "status", "8b")

    # Fewer of them, while each has streams under way: none is lost.
    program = alice.begin_streams("8b", 8)
    assert "8b has 2 replicas, it had 5." in alice.hpc_serve_said("scale", "8b", "2")
    assert len(states(alice, "8b")) == 2

    alice.hpc_serve_said("stop", next(iter(states(alice, "8b"))))
    assert len(states(alice, "8b")) == 1
    alice.hpc_serve_said("stop", "8b")
    assert result_of(program)["streams"] == [[40, "stop"]] * 8
    assert states(alice, "8b") == {}
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")


def test_an_array_is_stopped_by_its_id_while_it_waits(alice):
    told = json.loads(
        alice.hpc_serve_said("submit", "8b", "--name", "held", "--replicas", "3", "--sbatch=--hold", *SMALL, "--json")
    )
    array = told["job_id"]
    assert states(alice, "held") == {f"{array}_{task}": "pending" for task in range(3)}
    said = alice.hpc_serve_said("stop", f"{array}_1")
    assert f"held (job {array}_1) is over: stopped" in said
    assert states(alice, "held") == {f"{array}_0": "pending", f"{array}_2": "pending"}
    alice.hpc_serve_said("stop", array)
    assert states(alice, "held") == {}
