"""All ways to keep a service at once, on a real Slurm: bounds, keep-up, idle stop and requeue, two replicas in a job.

It goes through a time limit, a successor that fails, a load wave, sleep and wake. The engine is the stub, which works
on two requests at once. The times are short, by environment. It takes ten minutes, so it runs where LONG is set.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from tests.cluster import wait_for
from tests.e2e.wanted import MOST_S, STUB_WORDS, WantedSeen, start_asking, told_at_the_end

pytestmark = [pytest.mark.slurm]

SERVICE = "composed"
LONG = "HPC_SERVE_ALL_OPTIONS"
SMALL = ("--mem", "4G", "--cpus-per-task", "2", "--no-exclusive", "--gpus-per-node", "2")
KEPT = ("--replicas", "1:3", "--keep-up", "--idle-stop", "20s", "--requeue", "--replicas-per-job", "2")


@pytest.fixture
def alice_variables(stub_env):
    times = {"HPC_SERVE_ADD_AFTER_S": "2", "HPC_SERVE_LEAVE_AFTER_S": "20"}
    return {**stub_env, **times}


@pytest.mark.skipif(LONG not in os.environ, reason=f"takes ten minutes: {LONG}=1 runs it")
def test_all_options_at_once_lose_no_request(alice, show_table):
    words = f"{STUB_WORDS} --stub-hold-file '{alice.home}/hold-$HPC_SERVE_JOB_ID'"
    alice = replace(alice, environ={**alice.environ, "STUB_ENGINE_ARGS": words})
    limit = ("--time", "4", "--signal", "B:USR1@30")
    submitted = alice.hpc_serve_said("submit", "8b", "--name", SERVICE, *KEPT, *limit, *SMALL, "--json")
    first = json.loads(submitted)["job_id"]
    successor = f"{int(first) + 1}_0"
    alice.write(f"hold-{successor}", "")  # it shall start until it is cancelled
    asking = start_asking(alice, 1, SERVICE)
    seen = WantedSeen(alice, SERVICE)
    wait_for(lambda: seen.ready() == [first], MOST_S, what="the first job, of two replicas")

    wait_for(lambda: successor in seen.look(), MOST_S, what="a successor before the limit")
    assert seen.has_decided("submit", "handover")
    alice.cancel(successor)  # it fails
    lengthened = alice.cluster.run(["scontrol", "update", f"JobId={first}", "TimeLimit=5"], user="root")
    assert lengthened.returncode == 0, lengthened.stderr
    wait_for(lambda: seen.has_decided("drain", "handover"), MOST_S, what="another successor that took over")
    wait_for(lambda: first not in seen.look(), MOST_S, what="the end of the first job")

    wave = start_asking(alice, 12, SERVICE)
    wait_for(lambda: seen.count == 3 and len(seen.ready()) == 2, MOST_S, what="another job under load")
    load = told_at_the_end(wave)
    wait_for(lambda: len(seen.look()) == 1 and seen.count == 1, MOST_S, what="one job after the load")
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
