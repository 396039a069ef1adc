"""A service whose number of replicas follows its load, on a real Slurm: more, fewer, none, and back, by nobody's hand.

The engine is the stub, which works on two requests at once. The times are short, by environment.
"""

from __future__ import annotations

import sys

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import SMALL
from tests.e2e.wanted import MOST_S, STUB_WORDS, WantedSeen, told_at_the_end

pytestmark = [pytest.mark.slurm]

SERVICE = "elastic"
MOST, THREADS = 4, 8


@pytest.fixture
def alice_variables(stub_env):
    times = {"HPC_SERVE_ADD_AFTER_S": "2", "HPC_SERVE_LEAVE_AFTER_S": "3"}
    return {**stub_env, **times, "STUB_ENGINE_ARGS": STUB_WORDS}


def live_jobs(alice):
    """Alice's jobs that wait or run."""
    argv = ("squeue", "--noheader", "--array", "--user", "alice", "--states=PENDING,CONFIGURING,RUNNING")
    return alice.run(*argv).stdout.splitlines()


def test_the_number_of_replicas_follows_the_load(alice, asking, show_table):
    alice.hpc_serve_said("submit", "8b", "--name", SERVICE, "--replicas", f"1:{MOST}", "--idle-stop", "10s", *SMALL)
    asking_little = asking.start(1, SERVICE)  # so that it does not fall asleep meanwhile
    alice.hpc_serve_said("wait", SERVICE, "--timeout", "5m")
    seen = WantedSeen(alice, SERVICE)
    most_jobs = 0

    def ready() -> int:
        nonlocal most_jobs
        most_jobs = max(most_jobs, len(live_jobs(alice)))
        return len(seen.ready())

    seen.wait_until(lambda: ready() == 1, what="one replica")

    many = asking.start(THREADS, SERVICE)
    little = told_at_the_end(asking_little)
    seen.wait_until(lambda: ready() == MOST, what="four replicas under load")
    asking_less = asking.start(1, SERVICE)  # meanwhile it is not idle
    load = told_at_the_end(many)
    seen.wait_until(lambda: ready() == 1, what="one replica under less load")
    less = told_at_the_end(asking_less)
    assert little["errors"] + load["errors"] + less["errors"] == []
    assert load["answered"] > THREADS

    seen.wait_until(lambda: ready() == 0 and seen.state == "asleep", what="a service that is asleep")
    wait_for(lambda: not live_jobs(alice), MOST_S, what="no job of it")
    wait_for(lambda: not alice.processes(), MOST_S, what="no process of it")
    folder = alice.home / ".hpc-serve" / "services" / SERVICE
    assert [path.name for path in folder.glob("*.drain")] == []
    assert f"{SERVICE} is asleep since " in alice.hpc_serve_said("status")

    refused = alice.run(sys.executable, "-c", f"from hpc_serve.client import connect; connect({SERVICE!r}, wait=60)")
    assert f"ServiceAsleepError: {SERVICE} is asleep: no request for " in refused.stderr.replace(
        "hpc_serve.errors.", ""
    )

    asking_again = asking.start(1, SERVICE)
    seen.wait_until(lambda: ready() == 1, what="the replica that was woken")
    assert seen.state == "awake"
    woken = told_at_the_end(asking_again)  # it has had an answer, whenever it is told to end
    assert woken["errors"] == []
    assert woken["answered"] >= 1
    show_table(
        "\n".join([*seen.decided, f"{load['answered'] + less['answered']} requests answered; at most {most_jobs} jobs"])
    )
    assert most_jobs <= MOST
    alice.hpc_serve_said("stop", SERVICE)
    assert live_jobs(alice) == []
    assert ready() == 0
    assert seen.state == "stopped"
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")
