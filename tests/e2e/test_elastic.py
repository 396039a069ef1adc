"""A service whose number of replicas follows its load, on a real Slurm: more, fewer, none, and back, by nobody's hand.

The engine is the stub, which works on two requests at once. The times are short, by environment.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User

pytestmark = [pytest.mark.slurm]

ASKING = Path(__file__).with_name("keep_asking.py")
SERVICE = "elastic"
MOST, THREADS = 4, 8
SMALL = ("--mem", "2G", "--cpus-per-task", "2", "--no-exclusive")
TIMES = {"HPC_SERVE_ADD_AFTER_S": "2", "HPC_SERVE_LEAVE_AFTER_S": "3"}
MOST_S = 300.0


@pytest.fixture
def alice(cluster, alice_env, stub_env):
    """Alice, whose stub engines take two seconds for an answer."""
    words = "--stub-slots 2 --stub-words 10 --stub-word-s 0.2"
    user = User(cluster, {**alice_env, **stub_env, **TIMES, "STUB_ENGINE_ARGS": words})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 180, what="the end of what a failed test left")


class Seen:
    """What `status` and squeue tell of the service, look by look."""

    def __init__(self, alice: User) -> None:
        self._alice = alice
        self.most_jobs = 0
        self.state = ""
        self.decided: list[str] = []

    def ready(self) -> int:
        """How many replicas are ready now."""
        told = json.loads(self._alice.hpc_serve_said("status", SERVICE, "--json"))
        wanted = told["wanted"][SERVICE]
        self.state = wanted["state"]
        self.decided += [one["text"] for one in wanted["decided"] if one["text"] not in self.decided]
        self.most_jobs = max(self.most_jobs, len(self.jobs()))
        return sum(one["state"] == "ready" for one in told["services"])

    def jobs(self) -> list[str]:
        """Its jobs that wait or run."""
        argv = ("squeue", "--noheader", "--array", "--user", "alice", "--states=PENDING,CONFIGURING,RUNNING")
        return self._alice.run(*argv).stdout.splitlines()


def start_asking(alice: User, threads: int, service: str = SERVICE) -> subprocess.Popen:
    argv = [sys.executable, str(ASKING), service, str(threads)]
    program = alice.cluster.popen(argv, user="alice", env=dict(alice.environ))
    assert program.stdout.readline().strip() == "connected", program.stdout.read()
    return program


def told_at_the_end(program: subprocess.Popen) -> dict:
    """What the program says once it is told to end; it has had an answer by then."""
    program.send_signal(signal.SIGTERM)
    try:
        out, _ = program.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            program.communicate(timeout=5)
        program.kill()
        out, _ = program.communicate()
        raise AssertionError(f"it does not end: {out}") from None
    return json.loads(out.splitlines()[-1])


def test_the_number_of_replicas_follows_the_load(alice, show_table):
    alice.hpc_serve_said("submit", "8b", "--name", SERVICE, "--replicas", f"1:{MOST}", "--idle-stop", "10s", *SMALL)
    asking_little = start_asking(alice, 1)  # from the first replica on, so that it does not fall asleep meanwhile
    alice.hpc_serve_said("wait", SERVICE, "--timeout", "5m")
    seen = Seen(alice)
    wait_for(lambda: seen.ready() == 1, MOST_S, what="one replica")

    asking = start_asking(alice, THREADS)
    little = told_at_the_end(asking_little)
    wait_for(lambda: seen.ready() == MOST, MOST_S, what="four replicas under load")
    asking_less = start_asking(alice, 1)  # meanwhile it is not idle
    load = told_at_the_end(asking)
    wait_for(lambda: seen.ready() == 1, MOST_S, what="one replica under less load")
    less = told_at_the_end(asking_less)
    assert little["errors"] + load["errors"] + less["errors"] == []
    assert load["answered"] > THREADS

    wait_for(lambda: seen.ready() == 0 and seen.state == "asleep", MOST_S, what="a service that is asleep")
    wait_for(lambda: not seen.jobs(), MOST_S, what="no job of it")
    wait_for(lambda: not alice.processes(), MOST_S, what="no process of it")
    folder = alice.home / ".hpc-serve" / "services" / SERVICE
    assert [path.name for path in folder.glob("*.drain")] == []
    assert f"{SERVICE} is asleep since " in alice.hpc_serve_said("status")

    refused = alice.run(sys.executable, "-c", f"from hpc_serve.client import connect; connect({SERVICE!r}, wait=60)")
    assert f"ServiceAsleepError: {SERVICE} is asleep: no request for " in refused.stderr.replace(
        "hpc_serve.errors.", ""
    )

    asking_again = start_asking(alice, 1)
    wait_for(lambda: seen.ready() == 1, MOST_S, what="the replica that was woken")
    assert seen.state == "awake"
    woken = told_at_the_end(asking_again)  # it has had an answer, whenever it is told to end
    assert woken["errors"] == []
    assert woken["answered"] >= 1
    show_table(
        "\n".join(
            [*seen.decided, f"{load['answered'] + less['answered']} requests answered; at most {seen.most_jobs} jobs"]
        )
    )
    assert seen.most_jobs <= MOST
    alice.hpc_serve_said("stop", SERVICE)
    assert seen.jobs() == []
    assert seen.ready() == 0
    assert seen.state == "stopped"
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")
