"""A planned end loses no request: streams under way finish, new requests are refused or go to another replica.

Real Slurm; the engine is the stub. Four streams stand still after some words while a file exists: they are under way
at each end, however slow this test is, and go on once a new request was refused.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_serve.submit.slurm.slurm import parse_scontrol_job
from tests.e2e.jobs import User, result_of, stub_script

pytestmark = [pytest.mark.slurm]

WORDS, WORD_S, HELD_AFTER = 20, 0.1, 5
STREAMS = 4
ENDS_WITHIN_S = 300.0


def serve(alice: User, service: str) -> tuple[str, Path]:
    """A service's job, and the file that holds its streams."""
    held = alice.write(f"{service}.held", "")
    holds = ("--stub-step-file", str(held), "--stub-hang-after", str(HELD_AFTER))
    text = stub_script(service, "--stub-words", str(WORDS), "--stub-word-s", str(WORD_S), *holds)
    job_id = alice.sbatch(alice.write(f"{service}.sh", text))
    alice.wait_until_ready(service, job_id)
    return job_id, held


def stop(alice: User, service: str, job_id: str) -> None:
    done = alice.hpc_serve("stop", service, timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr


def scancel(alice: User, service: str, job_id: str) -> None:
    alice.cancel(job_id)


def notice(alice: User, service: str, job_id: str) -> None:
    """What --signal=B:USR1@120 sends before the time limit."""
    done = alice.run("scancel", "--batch", "--signal=USR1", job_id)
    assert done.returncode == 0, done.stderr


def terminate(alice: User, service: str, job_id: str) -> None:
    """What --signal=B:TERM@120 sends."""
    done = alice.run("scancel", "--batch", "--signal=TERM", job_id)
    assert done.returncode == 0, done.stderr


NOTICE = "Slurm, before the time limit"


@pytest.mark.parametrize(
    ("end", "who"),
    [(stop, "hpc-serve stop"), (scancel, "SIGTERM"), (notice, NOTICE), (terminate, NOTICE)],
    ids=["stop", "scancel", "notice", "terminate"],
)
def test_a_planned_end_loses_no_stream(alice, end, who):
    service = f"drain-{end.__name__}"
    job_id, held = serve(alice, service)
    program = alice.begin_streams(service, STREAMS, held)
    end(alice, service, job_id)
    result = result_of(program)
    assert result["streams"] == [[WORDS, "stop"]] * STREAMS
    alice.wait_until_gone(job_id, ENDS_WITHIN_S)
    record = alice.record(service, job_id)
    assert (record["state"], record["exit_code"]) == ("stopped", 0), record["reason"]
    assert record["reason"].startswith(who)
    assert "under way finished" in record["reason"]
    assert f"No replica of {service} takes requests. {service} is draining" in result["refusal"], result["refusal"]
    if end is not scancel:
        assert "JobState=COMPLETED" in alice.run("scontrol", "show", "job", job_id).stdout
    assert not list((alice.home / ".hpc-serve" / "services" / service).glob("*.drain"))


def test_stop_now_ends_a_drain(alice):
    job_id, _ = serve(alice, "drain-now")
    program = alice.begin_streams("drain-now", STREAMS)
    notice(alice, "drain-now", job_id)
    alice.wait_for_record("drain-now", job_id, lambda record: record["stage"] == f"finishing {STREAMS} requests", 120)
    done = alice.hpc_serve("stop", "--now", "drain-now", timeout=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    record = alice.record("drain-now", job_id)
    assert (record["state"], record["exit_code"]) == ("stopped", 0)
    assert "did not finish in time" in record["reason"]
    result_of(program)


def test_the_time_limit_is_told_to_the_script(alice):
    """sbatch's own options win over the script's, and however many tasks they ask for, there is one launcher a node.

    It is submitted as from within another job. The limit is set once the replica is ready: it is told soon then.
    """
    script = alice.write("limit.sh", stub_script("limit"))
    job_id = alice.sbatch(
        script, "--time=30", "--signal=B:USR1@60", "--ntasks-per-node=2", env={"SLURM_MEM_PER_CPU": "9"}
    )
    alice.wait_until_ready("limit", job_id)
    job = parse_scontrol_job(alice.run("scontrol", "--oneliner", "show", "job", job_id).stdout, job_id)
    minutes = int(time.time() - job.started_at) // 60 + 2
    done = alice.run("scontrol", "update", f"jobid={job_id}", f"timelimit={minutes}")
    assert done.returncode == 0, done.stderr
    alice.wait_until_gone(job_id, 300)
    record = alice.record("limit", job_id)
    assert (record["state"], record["exit_code"]) == ("stopped", 0)
    assert record["reason"].startswith(NOTICE)
