"""All ways to keep a service at once, on a real Slurm: bounds, keep-up, idle stop and requeue, two replicas in a job.

It goes through a time limit, a successor that fails, a load wave, sleep and wake. The engine is the stub, which works
on two requests at once. The times are short, by environment. It takes ten minutes, so it runs where LONG is set.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User
from tests.e2e.test_elastic import start_asking, told_at_the_end

pytestmark = [pytest.mark.slurm]

SERVICE = "composed"
SMALL = ("--mem", "4G", "--cpus-per-task", "2", "--no-exclusive", "--gpus-per-node", "2")
TIMES = {"HPC_SERVE_ADD_AFTER_S": "2", "HPC_SERVE_LEAVE_AFTER_S": "20"}
KEPT = ("--replicas", "1:3", "--keep-up", "--idle-stop", "20s", "--requeue", "--replicas-per-job", "2")
MOST_S = 300.0
LONG = "HPC_SERVE_ALL_OPTIONS"


@pytest.fixture
def alice(cluster, alice_env, stub_env):
    words = "--stub-slots 2 --stub-words 10 --stub-word-s 0.2"
    user = User(cluster, {**alice_env, **stub_env, **TIMES, "STUB_ENGINE_ARGS": words})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 180, what="the end of what a failed test left")


class Seen:
    """What `status` tells, look by look."""

    def __init__(self, alice: User) -> None:
        self._alice = alice
        self.decided: list[str] = []
        self.causes: set[tuple[str, str]] = set()
        self.state = ""

    def look(self) -> dict[str, list[str]]:
        """The states of the replicas of each job that is not over."""
        told = json.loads(self._alice.hpc_serve_said("status", SERVICE, "--json"))
        wanted = told["wanted"][SERVICE]
        self.state = wanted["state"]
        self.decided += [one["text"] for one in wanted["decided"] if one["text"] not in self.decided]
        self.causes |= {(one["action"], one["cause"]) for one in wanted["decided"]}
        live: dict[str, list[str]] = {}
        for one in told["services"]:
            if one["state"] not in ("stopped", "failed"):
                live.setdefault(one["job_id"], []).append(one["state"])
        return live

    def ready(self) -> list[str]:
        """The jobs of which all replicas are ready."""
        return [job_id for job_id, states in self.look().items() if set(states) == {"ready"}]

    def has_decided(self, action: str, cause: str) -> bool:
        self.look()
        return (action, cause) in self.causes


@pytest.mark.skipif(LONG not in os.environ, reason=f"takes ten minutes: {LONG}=1")
def test_all_options_at_once_lose_no_request(alice, show_table):
    limit = ("--time", "4", "--signal", "B:USR1@30")
    alice.hpc_serve_said("submit", "8b", "--name", SERVICE, *KEPT, *limit, *SMALL)
    asking = start_asking(alice, 1, SERVICE)
    seen = Seen(alice)
    wait_for(lambda: len(seen.ready()) == 1, MOST_S, what="the first job, of two replicas")
    (first,) = seen.ready()

    wait_for(lambda: seen.has_decided("submit", "handover"), 2 * MOST_S, what="a successor before the limit")
    (successor,) = set(seen.look()) - {first}
    alice.cancel(successor)  # it fails
    lengthened = alice.cluster.run(["scontrol", "update", f"JobId={first}", "TimeLimit=6"], user="root")
    assert lengthened.returncode == 0, lengthened.stderr
    wait_for(lambda: seen.has_decided("drain", "handover"), 2 * MOST_S, what="another successor that took over")
    wait_for(lambda: first not in seen.look(), MOST_S, what="the end of the first job")

    wave = start_asking(alice, 12, SERVICE)
    wait_for(lambda: len(seen.ready()) == 2, MOST_S, what="another job under load")
    load = told_at_the_end(wave)
    wait_for(lambda: seen.has_decided("drain", "load"), MOST_S, what="one that leaves after it")
    little = told_at_the_end(asking)

    wait_for(lambda: not seen.look() and seen.state == "asleep", MOST_S, what="a service that is asleep")
    again = start_asking(alice, 1, SERVICE)  # it wakes the service
    wait_for(lambda: len(seen.ready()) == 1, MOST_S, what="a job that was woken")
    woken = told_at_the_end(again)
    said = alice.hpc_serve_said("status", SERVICE)
    show_table("\n".join([*seen.decided, f"{load['answered'] + little['answered'] + woken['answered']} answered"]))
    assert [*load["errors"], *little["errors"], *woken["errors"]] == []
    assert f"{SERVICE}: 2 of 1 to 3 replicas" in said
    alice.hpc_serve_said("stop", SERVICE)
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")
