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
from tests.e2e.wanted import MOST_S, STUB_WORDS, WantedSeen, told_at_the_end

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
def test_all_options_at_once_lose_no_request(alice, asking, show_table):
    words = f"{STUB_WORDS} --stub-hold-file '{alice.home}/hold-$HPC_SERVE_JOB_ID'"
    alice = replace(alice, environ={**alice.environ, "STUB_ENGINE_ARGS": words})
    limit = ("--time", "4", "--signal", "B:USR1@30")
    submitted = alice.hpc_serve_said("submit", "8b", "--name", SERVICE, *KEPT, *limit, *SMALL, "--json")
    first = json.loads(submitted)["job_id"]
    successor = f"{int(first) + 1}_0"
    alice.write(f"hold-{successor}", "")  # it shall start until it is cancelled
    one = asking.start(1, SERVICE)
    seen = WantedSeen(alice, SERVICE)
    seen.wait_until(lambda: seen.ready() == [first], what="the first job, of two replicas")

    submitted_file = alice.home / ".hpc-serve" / "services" / SERVICE / "submitted" / f"{successor}.json"
    wait_for(submitted_file.exists, MOST_S, what="a successor before the limit")
    # At once: on a slow machine Slurm's notice would come before another successor is ready.
    lengthened = alice.cluster.run(["scontrol", "update", f"JobId={first}", "TimeLimit=6"], user="root")
    assert lengthened.returncode == 0, lengthened.stderr
    alice.cancel(successor)  # it fails
    assert seen.has_decided("submit", "handover")
    seen.wait_until(
        lambda: seen.has_decided("drain", "handover"), what="another successor that took over", timeout_s=2 * MOST_S
    )
    seen.wait_until(lambda: first not in seen.look(), what="the end of the first job")

    wave = asking.start(12, SERVICE)
    seen.wait_until(lambda: len(seen.ready()) >= 2 and seen.count == 3, what="another job under load")
    load = told_at_the_end(wave)
    seen.wait_until(lambda: len(seen.look()) == 1 and seen.count == 1, what="one job after the load")
    little = told_at_the_end(one)

    seen.wait_until(lambda: not seen.look() and seen.state == "asleep", what="a service that is asleep")
    again = asking.start(1, SERVICE)  # it wakes the service
    seen.wait_until(lambda: len(seen.ready()) == 1, what="a job that was woken")
    woken = told_at_the_end(again)
    said = alice.hpc_serve_said("status", SERVICE)
    show_table("\n".join([*seen.decided, f"{load['answered'] + little['answered'] + woken['answered']} answered"]))
    assert [*load["errors"], *little["errors"], *woken["errors"]] == []
    assert f"{SERVICE}: 2 of 1 to 3 replicas" in said
    alice.hpc_serve_said("stop", SERVICE)
    wait_for(lambda: not alice.processes(), MOST_S, what="no process left")
