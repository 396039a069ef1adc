"""An adapter that is added under load stays with its service, on a real Slurm: every request for it is answered by it.

Three replicas of the stub engine, whose answers for an adapter begin with its folder. One engine is killed, one replica
is added, and all jobs hand over before their time limit.
"""

from __future__ import annotations

import json
import signal

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import STUB, User, send
from tests.e2e.wanted import MOST_S, told_at_the_end
from tests.support.adapters import make_adapter

pytestmark = [pytest.mark.slurm]

SERVICE = "tuned"
SMALL = ("--mem", "2G", "--cpus-per-task", "1", "--no-exclusive")
LIMIT = ("--keep-up", "--time", "3", "--signal", "B:USR1@30")
ROOM = ("--", "--enable-lora", "--max-lora-rank", "8")
HIDDEN_8B = 4096


@pytest.fixture
def alice_variables(stub_env):
    return {**stub_env, "STUB_ENGINE_ARGS": "--stub-words 4 --stub-word-s 0.05"}


def ready(alice: User) -> set[str]:
    told = json.loads(alice.hpc_serve_said("status", SERVICE, "--json"))["services"]
    return {one["job_id"] for one in told if one["state"] == "ready"}


def test_every_request_for_an_adapter_is_answered_by_it(alice, asking, show_table):
    good = make_adapter(alice.home / "good", hidden=HIDDEN_8B, layers=1, rank=1)
    wide = make_adapter(alice.home / "wide", hidden=HIDDEN_8B, layers=1, rank=16)
    other = make_adapter(alice.home / "other", hidden=HIDDEN_8B + 128, layers=1, rank=1)
    alice.hpc_serve_said("submit", "8b", "--name", SERVICE, "--replicas", "3", *LIMIT, *SMALL, *ROOM)
    alice.hpc_serve_said("wait", SERVICE, "--replicas", "3", "--timeout", "5m")
    first = ready(alice)
    plain = asking.start(2, SERVICE)

    for folder, said in (
        (wide, "has 16"),
        (other, "no adapter of this model"),
        (alice.home / "none", "neither a folder"),
    ):
        refused = alice.hpc_serve("adapter", "add", SERVICE, "sql", str(folder))
        assert refused.returncode == 2
        assert said in refused.stderr
    added = alice.hpc_serve_said("adapter", "add", SERVICE, "sql", str(good))
    assert "3 replicas" in added
    for_it = asking.start(4, SERVICE, "sql")

    engines = [process.pid for process in alice.processes() if str(STUB) in process.argv[:2]]
    assert len(engines) == 3
    send(engines[:1], signal.SIGKILL)
    alice.hpc_serve_said("scale", SERVICE, "4")
    wait_for(lambda: len(ready(alice)) == 4, MOST_S, what="four replicas, with one that was started again")
    wait_for(lambda: not ready(alice) & first, MOST_S, what="the handover of the first three", step_s=2.0)
    listed = json.loads(alice.hpc_serve_said("adapter", "list", SERVICE, "--json"))
    told, told_plain = told_at_the_end(for_it), told_at_the_end(plain)
    show_table(
        f"{told['answered']} requests for the adapter, {told_plain['answered']} for the model; none lost or mistaken"
    )

    assert told["errors"] + told_plain["errors"] == []
    assert told["first_words"] == [f"adapter-{good}"]
    assert not [words for words in told_plain["first_words"] if words.startswith("adapter-")]
    assert listed[0]["faults"] == {}

    alice.hpc_serve_said("adapter", "remove", SERVICE, "sql")
    assert json.loads(alice.hpc_serve_said("adapter", "list", SERVICE, "--json")) == []
    alice.hpc_serve_said("stop", SERVICE)
    wait_for(lambda: not alice.processes(), 180, what="no process left")
