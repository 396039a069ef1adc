"""A service of one replica that is kept up loses nothing across time limits, on a real Slurm.

The engine is the stub, and the load that of the fault suite: streams and whole answers, through one client in threads,
one in asyncio, and programs that connect anew. Every answer is compared with the unbroken one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.submit.slurm.slurm import parse_scontrol_job
from tests.cluster import wait_for
from tests.cluster.config import CHECKOUT
from tests.e2e.jobs import SMALL, User
from tests.faults.outcomes import count
from tests.faults.service import read_lines

pytestmark = [pytest.mark.slurm]

IN_FLIGHT, TOKENS, TOKEN_S = 10, 40, 0.1
LONG = "HPC_SERVE_FIVE_TIME_LIMITS"
Jobs = dict[str, dict]


def stub_words(*, load_s: int, hold_file: str = "") -> str:
    hold = f" --stub-hold-file '{hold_file}'" if hold_file else ""
    return f"--stub-greedy --stub-words {TOKENS} --stub-word-s {TOKEN_S} --stub-load-s {load_s}{hold}"


@pytest.fixture
def alice_variables(stub_env):
    """Stub engines that take a while to load, and answer with a text that follows from the prompt."""
    return {**stub_env, "STUB_ENGINE_ARGS": stub_words(load_s=20)}


def jobs(alice: User, service: str) -> Jobs:
    """What `status` says of each job of the service."""
    return {
        one["job_id"]: one for one in json.loads(alice.hpc_serve_said("status", service, "--all", "--json"))["services"]
    }


def times(alice: User, job_id: str) -> tuple[float, float]:
    """When the job began and ended, by Slurm."""
    job = parse_scontrol_job(alice.run("scontrol", "--oneliner", "show", "job", job_id).stdout, job_id)
    return job.started_at, job.ended_at


def lengthen(alice: User, job_id: str, minutes: int) -> None:
    """Give a job a time limit of so many minutes."""
    done = alice.cluster.run(["scontrol", "update", f"JobId={job_id}", f"TimeLimit={minutes}"], user="root")
    assert done.returncode == 0, done.stderr


def start_load(alice: User, service: str):
    """The load's program, once it has had answers, and its file of outcomes."""
    out = alice.home / "load" / f"{service}.jsonl"
    argv = [sys.executable, "-m", "tests.faults.load", service, "--out", str(out)]
    argv += ["--in-flight", str(IN_FLIGHT), "--tokens", str(TOKENS), "--bound", "60"]
    done = alice.run("mkdir", "-p", str(out.parent))
    assert done.returncode == 0, done.stderr
    program = alice.cluster.popen(argv, user="alice", env=dict(alice.environ), cwd=CHECKOUT)
    wait_for(lambda: program.poll() is not None or len(read_lines(out)) >= IN_FLIGHT, 180, what="the load's answers")
    assert program.poll() is None, program.stdout.read()
    return program, out


@pytest.mark.parametrize(
    ("limits", "minutes", "load_s"),
    [
        (1, 2, 4),
        pytest.param(
            5, 3, 40, marks=pytest.mark.skipif(not os.environ.get(LONG), reason=f"takes ten minutes: {LONG}=1 runs it")
        ),
    ],
    ids=["one-limit", "five-limits"],
)
def test_one_replica_loses_nothing_across_time_limits(alice, limits, minutes, load_s, show_table):
    words = stub_words(load_s=load_s, hold_file=f"{alice.home}/hold-$HPC_SERVE_JOB_ID")
    alice = replace(alice, environ={**alice.environ, "STUB_ENGINE_ARGS": words})
    service = f"kept-{limits}"
    model = ("8b", "--name", service, "--time", str(minutes), "--signal", "B:USR1@30")
    submitted = alice.hpc_serve_said("submit", *model, "--keep-up", *SMALL, "--json")
    first = json.loads(submitted)["job_id"]
    second = f"{int(first) + 1}_0"
    held = alice.write(f"hold-{second}", "")  # until `status` has told that it starts
    alice.hpc_serve_said("wait", service, "--timeout", "5m")
    program, out = start_load(alice, service)
    began_at = time.monotonic()
    is_starting = f"{second} starting"
    wait_for(lambda: jobs(alice, service)[first]["successor"] == is_starting, 60 * minutes, what=is_starting)
    lengthen(alice, first, minutes + 1)  # on a slow machine, Slurm's notice would come before the successor is ready
    held.unlink()

    def ended() -> list[dict]:
        return [one for one in jobs(alice, service).values() if one["state"] in ("stopped", "failed")]

    # One limit: until it has passed. Five: until five jobs have ended in a row, each before its own.
    wait_for(lambda: len(ended()) >= limits, limits * (60 * minutes + 60), what=f"{limits} handovers", step_s=2.0)
    if limits == 1:
        limit_at = times(alice, first)[0] + 60 * minutes
        wait_for(lambda: time.time() > limit_at + 5, 60 * minutes + 60, what="the time limit", step_s=2.0)
    in_order = sorted(ended(), key=lambda one: one["started_at"])
    program.send_signal(signal.SIGTERM)
    program.wait(timeout=300)

    for one in in_order:  # a record says that it has stopped before Slurm does, which tells a forecast until then
        alice.wait_until_over(one["job_id"])
    rows = []
    everything = sorted(jobs(alice, service).values(), key=lambda one: one["started_at"] or time.time())
    for one, after in zip(in_order, everything[1:], strict=False):
        assert (one["state"], one["exit_code"]) == ("stopped", 0), one["reason"]
        assert one["reason"].startswith(f"hpc-serve: job {after['job_id']} has taken over"), one["reason"]
        begun, end = times(alice, one["job_id"])
        overlap_s, start_s = end - times(alice, after["job_id"])[0], after["measured"]["start_s"]
        rows.append(
            f"{one['job_id']:>8} ran {end - begun:4.0f} s  overlap {overlap_s:4.0f} s  start {start_s:5.1f} s"
            f"  ratio {overlap_s / start_s:.2f}"
        )
        assert end - begun < 60 * (minutes + 1 if one["job_id"] == first else minutes)
    assert everything[1]["job_id"] == second

    outcome = count(service, read_lines(out), [], fault_at=began_at)
    show_table("\n".join([*rows, f"{outcome.sent} requests, {outcome.answered} answered, lost: {outcome.reasons}"]))
    assert outcome.answered == outcome.sent, outcome.reasons
    assert outcome.sent > 2 * IN_FLIGHT

    alice.hpc_serve_said("stop", service)
    states = {one["state"] for one in jobs(alice, service).values()}
    assert states == {"stopped"}
    wait_for(lambda: queue_of(alice) == "", 180, what="an empty queue")
    wait_for(lambda: not alice.processes(), 180, what="no process left")


def queue_of(alice: User) -> str | None:
    """What squeue lists of the user's jobs; None if it has no answer."""
    done = alice.run("squeue", "--noheader", "--user", "alice")
    return done.stdout if done.returncode == 0 else None


def problem_of(alice: User, service: str) -> str:
    """What `status` says of the last job that was added and failed."""
    return json.loads(alice.hpc_serve_said("status", service, "--json"))["wanted"][service]["problem"]


def batch_log(alice: User, service: str, job_id: str) -> str:
    return (alice.home / ".hpc-serve" / "services" / service / "logs" / f"{job_id}.log").read_text()


def test_a_successor_that_fails_is_tried_again_and_stop_ends_the_chain(alice):
    """The successor is cancelled while it waits, as an administrator may; `stop` ends the next, which waits too."""
    service = "kept-again"
    alice = replace(alice, environ={**alice.environ, "STUB_ENGINE_ARGS": stub_words(load_s=40)})
    alone = ("--nodelist", "n1", "--exclusive", "--time", "3", "--signal", "B:USR1@30")
    first = json.loads(alice.hpc_serve_said("submit", "8b", "--name", service, "--keep-up", *alone, "--json"))["job_id"]
    alice.hpc_serve_said("wait", service, "--timeout", "5m")

    def successor() -> str:
        return jobs(alice, service)[first]["successor_job_id"]

    waiting = wait_for(successor, 180, what="a successor")
    lengthen(alice, first, 4)  # the next one is due all the same, and has more time until Slurm's notice
    assert waiting == f"{int(first) + 1}_0"
    assert re.search(rf"successor +{waiting} pending", alice.hpc_serve_said("status", service))
    alice.cancel(waiting)
    sentence = wait_for(lambda: problem_of(alice, service), 180, what="a successor that is tried again")
    assert str(sentence).startswith(f"job {waiting}, which was added, "), sentence
    again = wait_for(successor, 180, what="another successor")
    assert again != waiting
    alice.hpc_serve_said("stop", service)
    ends = {job: one["state"] for job, one in jobs(alice, service).items()}
    assert ends.pop(waiting) in ("stopped", "failed")  # Slurm forgets a task that waited as it is cancelled
    assert set(ends.values()) == {"stopped"}
    wait_for(lambda: queue_of(alice) == "", 180, what="an empty queue")
    assert f"submitted 1 {first}: the time limit of {first} comes" in batch_log(alice, service, first)
    alice.wait_until_gone(first)
    assert not list(Path(alice.home / ".hpc-serve" / "services" / service).glob("*.drain"))


def test_jobs_submitted_ahead_take_over_from_each_other_and_end_with_the_service(alice):
    """The second job is let begin before its time, since the least time between two is a minute."""
    service = "ahead"
    alice = replace(alice, environ={**alice.environ, "STUB_ENGINE_ARGS": stub_words(load_s=1)})
    model = ("8b", "--name", service, "--chain", "3", "--time", "60", *SMALL, "--json")
    told = json.loads(alice.hpc_serve_said("submit", *model))
    first, second, third = told["job_id"], *(one["job_id"] for one in told["ahead"])
    alice.hpc_serve_said("wait", service, "--timeout", "3m")
    queued = alice.run("squeue", "--noheader", "--user", "alice", "--format=%i %E", "--states=PENDING").stdout
    assert sorted(queued.splitlines()) == [
        f"{second} after:{first}+30(unfulfilled)",
        f"{third} after:{second}+30(unfulfilled)",
    ]
    assert jobs(alice, service)[first]["successor"] == f"{second} pending, then {third}"
    released = alice.run("scontrol", "update", f"JobId={second}", "Dependency=")
    assert released.returncode == 0, released.stderr
    wait_for(lambda: jobs(alice, service)[first]["state"] == "stopped", 300, what="the end of the first job")
    ends = jobs(alice, service)
    assert ends[first]["reason"].startswith(f"hpc-serve chain: job {second} has taken over")
    assert (ends[second]["state"], ends[second]["successor"]) == ("ready", f"{third} pending")
    alice.hpc_serve_said("stop", service)
    wait_for(lambda: queue_of(alice) == "", 180, what="an empty queue")
    wait_for(lambda: not alice.processes(), 180, what="no process left")
