"""What the commands say when something goes wrong, or is done by hand, on a real Slurm.

The engine is the stub (tests/support/stub_engine.py), put in vLLM's place by the environment that scripts activate;
everything else is real. test_commands.py goes through a day's commands with a real vLLM.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import SMALL, User

pytestmark = [pytest.mark.slurm]

WAIT = ("--wait", "--timeout", "5m")
HOLD = ("--sbatch", "--hold")


@pytest.fixture
def alice_variables(stub_env):
    return stub_env


def submit(alice: User, name: str, *words: str, env=None):
    """`hpc-serve submit` of a small job, to its end."""
    return alice.hpc_serve("submit", "--model", "8b", "--name", name, *SMALL, *words, env=env, timeout=400)


def submitted(alice: User, name: str, *words: str, env=None) -> str:
    """The id of a job that was taken."""
    done = submit(alice, name, "--json", *words, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job_id"]


def status_of(alice: User, service: str) -> dict[str, Any]:
    done = alice.hpc_serve("status", service, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"][-1]


def test_the_key_is_in_no_command_line_script_log_or_job(alice):
    job_id = submitted(alice, "secret", *WAIT)
    key = (alice.home / ".hpc-serve" / "services" / "secret" / "api_key").read_text().strip()
    assert len(key) > 30
    shown = alice.run("scontrol", "show", "job", job_id).stdout
    spooled = alice.run("scontrol", "write", "batch_script", job_id, "-").stdout
    assert "vllm serve" in spooled
    logs = [Path(path).read_text() for path in status_of(alice, "secret")["logs"]]
    assert len(logs) == 2
    argvs = [" ".join(process.argv) for process in alice.processes()]
    assert len(argvs) >= 3
    assert not [text for text in (shown, spooled, *logs, *argvs) if key in text]


def test_an_engine_that_fails_is_told_by_wait_and_by_status(alice):
    done = submit(alice, "fails", *WAIT, env={"STUB_ENGINE_ARGS": "--stub-fail 'ValueError: no_memory'"})
    assert done.returncode == 6
    assert "failed: engine exited with 1: ValueError: no_memory" in done.stderr
    status = status_of(alice, "fails")
    assert (status["state"], status["failed_part"], status["exit_code"]) == ("failed", "engine", 1)


def test_a_script_that_fails_before_the_launcher_is_told_by_slurm_and_its_log(alice):
    broken = alice.home / "broken-env" / "bin"
    broken.mkdir(parents=True)
    (broken / "activate").write_text("echo 'the module system is broken' >&2; exit 42\n")
    done = submit(alice, "script", *WAIT, env={"HPC_SERVE_ENV": str(broken.parent)})
    assert done.returncode == 6
    assert "its script exited with code 42 (FAILED)" in done.stderr
    assert "the module system is broken" in done.stderr


def test_a_script_by_hand_that_fails_before_python_is_known_with_its_output(alice):
    script = alice.write("early.sh", alice.hpc_serve("render", "--model", "8b", "--name", "early", *SMALL).stdout)
    job_id = alice.sbatch(script, env={"HPC_SERVE_ENV": "/nonexistent"})
    wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of the script")
    status = status_of(alice, "early")
    assert (status["job_id"], status["state"], status["exit_code"]) == (job_id, "failed", 78)
    assert status["logs"] == [str(alice.home / f"hpc-serve-early-{job_id}.log")]
    assert "no Python environment in /nonexistent" in status["last_log_lines"][-1]
    assert "no Python environment in /nonexistent" in alice.hpc_serve("logs", "early").stdout


def test_a_job_that_was_stopped_in_the_queue_is_known_to_everybody(alice):
    submitted(alice, "queued", *HOLD)
    assert "is pending: it has not started" in alice.hpc_serve("chat", "queued", "hello").stderr
    assert alice.hpc_serve("stop", "queued").returncode == 0
    told = "queued is stopped: it was cancelled before it began (CANCELLED)"
    assert told in alice.hpc_serve("chat", "queued", "hello").stderr
    assert status_of(alice, "queued")["state"] == "stopped"


def test_a_further_replica_is_said_to_be_one(alice):
    first = submitted(alice, "twice", *HOLD)
    second = json.loads(submit(alice, "twice", "--json", *HOLD).stdout)
    assert second["other_jobs"] == [{"job_id": first, "state": "pending", "differs": []}]
    assert (
        f"it had 2 before, job {first} (pending), job {second['job_id']} (pending)"
        in submit(alice, "twice", *HOLD).stdout
    )
    assert alice.hpc_serve("stop", "twice").returncode == 0


def test_a_ready_service_that_is_cancelled_is_never_called_unresponsive(alice):
    job_id = submitted(alice, "leaving", *WAIT)
    alice.cancel(job_id)
    seen = []
    wait_for(lambda: seen.append(status_of(alice, "leaving")) or seen[-1]["state"] == "stopped", 180, what="its end")
    assert {status["state"] for status in seen} <= {"ready", "draining", "stopped"}
    wait_for(lambda: not alice.is_queued(job_id), 180, what="Slurm to have cleared it away")
    assert status_of(alice, "leaving")["reason"] == "it was cancelled (CANCELLED)"


def test_a_job_that_was_killed_outright_is_not_taken_for_a_live_one(alice):
    job_id = submitted(alice, "killed", *WAIT)
    alice.kill_at_once()
    wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of the killed job")
    status = status_of(alice, "killed")
    assert (status["state"], status["end_reported_by_job"]) == ("failed", False)
    assert "signal 9" in status["reason"]


@pytest.mark.parametrize("stage", ["pending", "loading weights"])
def test_scancel_is_told_as_a_stop_to_whoever_waits(alice, stage):
    held = HOLD if stage == "pending" else ()
    job_id = submitted(alice, "cancelled", *held, env={"STUB_ENGINE_ARGS": "--stub-load-s 100"})
    if stage == "pending":
        assert status_of(alice, "cancelled")["reason"].startswith("held by its owner")
    else:
        wait_for(lambda: status_of(alice, "cancelled")["stage"] == stage, 180, what=stage, step_s=0.5)
    alice.cancel(job_id)
    done = alice.hpc_serve("wait", "cancelled", "--timeout", "5m", timeout=400)
    assert done.returncode == 6
    assert f"cancelled (job {job_id}) stopped: " in done.stderr


def test_a_job_of_sbatch_is_seen_followed_and_stopped_like_any_other(alice):
    script = alice.write("hand.sh", alice.hpc_serve("render", "--model", "8b", "--name", "hand", *SMALL).stdout)
    job_id = alice.sbatch(script, "--hold")
    assert (status_of(alice, "hand")["job_id"], status_of(alice, "hand")["state"]) == (job_id, "pending")
    alice.run("scontrol", "release", job_id)
    done = alice.hpc_serve("wait", "hand", "--timeout", "5m", timeout=400)
    assert done.returncode == 0, done.stderr
    names = [Path(path).name for path in alice.hpc_serve("logs", "hand", "--files").stdout.split()]
    assert names == [f"hpc-serve-hand-{job_id}.log", f"{job_id}-node0.log"]
    following = alice.cluster.popen(["hpc-serve", "logs", "hand", "--follow"], user=alice.name, env=alice.environ)
    stopped = alice.hpc_serve("stop", job_id)
    assert stopped.returncode == 0, stopped.stderr
    assert f"hand (job {job_id}) is over: stopped" in stopped.stdout
    assert not alice.is_queued(job_id)
    assert "hpc-serve: hand is ready at" in following.communicate(timeout=300)[0]
    assert following.returncode == 0


def test_a_name_is_one_model_s_until_its_job_is_over(alice):
    job_id = submitted(alice, "name", *HOLD)
    other = ("submit", "--model", "70b", "--name", "name", *SMALL, *HOLD)
    taken = alice.hpc_serve(*other)
    assert taken.returncode == 5
    assert f"job {job_id}" in taken.stderr
    assert alice.hpc_serve("stop", "name").returncode == 0
    again = alice.hpc_serve(*other)
    assert again.returncode == 0, again.stderr


def test_a_requeued_job_is_waited_for_again(alice):
    job_id = submitted(alice, "again", *WAIT)
    alice.run("scontrol", "requeuehold", job_id)
    wait_for(lambda: status_of(alice, "again")["state"] == "pending", 180, what="the job to be back in the queue")
    # Slurm lets two minutes pass; within the second of the requeue slurmd refuses the job ("credential revoked").
    alice.run("scontrol", "update", f"jobid={job_id}", "starttime=now+2")
    alice.run("scontrol", "release", job_id)
    done = alice.hpc_serve("wait", "again", "--timeout", "6m", timeout=400)
    assert done.returncode == 0, done.stderr
    assert (status_of(alice, "again")["state"], status_of(alice, "again")["restart"]) == ("ready", 1)


def test_a_silent_controller_makes_a_state_unknown_and_ends_nothing(alice):
    waiting, ready = submitted(alice, "waiting", *HOLD), submitted(alice, "ready", *WAIT)
    alice.cluster.stop_controller()
    try:
        with ThreadPoolExecutor(3) as commands:  # each waits for the controller
            status, chatting, stopping = (
                commands.submit(alice.hpc_serve, *words)
                for words in (("status", "--json"), ("chat", "ready", "still there?"), ("stop", "waiting"))
            )
            report, chat, stop = json.loads(status.result().stdout), chatting.result(), stopping.result()
    finally:
        alice.cluster.start_controller()
    found = {status["job_id"]: status for status in report["services"]}
    assert found[waiting]["state"] == "unknown"
    assert "does not answer" in found[waiting]["reason"]
    assert found[ready]["state"] == "ready"
    assert "does not answer" in report["problems"][-1]
    assert chat.stdout.startswith("stub-")
    assert (stop.returncode, "does not answer" in stop.stderr) == (4, True)
    assert status_of(alice, "waiting")["state"] == "pending"
    assert alice.is_queued(ready)
