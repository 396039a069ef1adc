"""Slurm's answers, as a real Slurm gave them (slurm_outputs/), and what we make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_serve.errors import SchedulerError
from hpc_serve.submit.slurm.slurm import (
    GONE,
    SINFO_ARGV,
    SQUEUE_ARGV,
    UNKNOWN,
    JobState,
    parse_sacct,
    parse_sbatch,
    parse_scontrol_job,
    parse_sinfo,
    parse_squeue,
    sacct_argv,
    says_no_such_job,
    says_unreachable,
    sbatch_argv,
    scancel_argv,
    scontrol_show_job_argv,
)
from hpc_serve.submit.slurm.slurm_messages import ended_sentence, pending_cure, pending_sentence, refusal_hint

OUTPUTS = Path(__file__).parent / "slurm_outputs"


def recorded(command: str) -> dict[str, dict]:
    return json.loads((OUTPUTS / f"{command}.json").read_text())


SBATCH, SQUEUE, SCONTROL = recorded("sbatch"), recorded("squeue"), recorded("scontrol")
SCANCEL, SACCT, SINFO = recorded("scancel"), recorded("sacct"), recorded("sinfo")
PARTITIONS = parse_sinfo(SINFO["partitions"]["stdout"])


def scontrol_job(situation: str) -> JobState:
    answer = SCONTROL[situation]
    return parse_scontrol_job(answer["stdout"], answer["argv"][-1])


# The recordings were made with the very words that we use.


def test_the_recorded_commands_are_those_we_run():
    assert SBATCH["accepted"]["argv"] == sbatch_argv("/home/alice/job.sh")
    assert SQUEUE["me"]["argv"] == list(SQUEUE_ARGV)
    assert SCONTROL["unknown"]["argv"] == scontrol_show_job_argv("99999")
    assert SCANCEL["unknown"]["argv"] == scancel_argv("99999")
    assert SINFO["partitions"]["argv"] == list(SINFO_ARGV)
    argv = SACCT["failed"]["argv"]
    since = next(word.partition("=")[2] for word in argv if word.startswith("--starttime="))
    assert argv == sacct_argv(["45"], user="nobody", since=since)


# sbatch


@pytest.mark.parametrize(
    ("stdout", "job_id"),
    [
        (SBATCH["accepted"]["stdout"], "24"),
        (SBATCH["parsable"]["stdout"], "25"),
        ("Submitted batch job 12 on cluster gpu2\n", "12"),  # from the documentation
        ("12;gpu2\n", "12"),
        ("sbatch: welcome to the job submit plugin\nSubmitted batch job 7\n", "7"),
    ],
)
def test_sbatch_tells_the_job_id(stdout, job_id):
    assert parse_sbatch(stdout) == job_id


# squeue


def listed(situation: str) -> dict[str, JobState]:
    return {job.job_id: job for job in parse_squeue(SQUEUE[situation]["stdout"])}


def test_squeue_tells_states_reasons_and_odd_names():
    jobs = listed("me")
    assert (jobs["11"].state, jobs["11"].reason, jobs["11"].is_pending) == ("PENDING", "Resources", True)
    assert jobs["9"].is_running
    assert (jobs["9"].node_list, jobs["9"].name, jobs["9"].user) == ("n[1-2]", "hpc-serve-405b", "alice")
    assert jobs["13"].name == "has a|bar and JobState=RUNNING"
    assert jobs["14"].start_time == "2026-11-21T06:04:02"
    assert {"17_0", "17_1", "17_2"} < set(jobs)


def test_squeue_tells_how_jobs_ended_and_whether_they_had_begun():
    ended = {job.job_id: job for job in listed("me").values() if job.is_over}
    states = {job_id: job.state for job_id, job in ended.items()}
    assert states == {
        **{"1": "COMPLETED", "2": "FAILED", "3": "FAILED", "4": "FAILED"},
        **{"5": "NODE_FAIL", "6": "CANCELLED", "7": "CANCELLED", "8": "TIMEOUT"},
    }
    assert [job_id for job_id, job in ended.items() if not job.has_begun] == ["7"]
    assert ended_sentence(ended["7"]) == "it was cancelled before it began (CANCELLED)"


def test_squeue_tells_times():
    job = listed("me")["5"]
    assert job.run_time_s == 68
    assert job.ended_at - job.submitted_at == 69
    assert listed("me")["13"].ended_at is None


def test_squeue_of_several_clusters_names_each_on_a_line():  # from the documentation
    assert parse_squeue("CLUSTER: gpu2\n" + SQUEUE["me"]["stdout"])[0].job_id == "16"


def test_a_line_that_is_not_understood_is_an_error():
    with pytest.raises(SchedulerError, match="not understood"):
        parse_squeue("26 RUNNING n1\n")


# scontrol


@pytest.mark.parametrize(
    ("situation", "state", "exit_code", "signal"),
    [
        ("running", "RUNNING", 0, 0),
        ("pending", "PENDING", 0, 0),
        ("completed", "COMPLETED", 0, 0),
        ("failed", "FAILED", 3, 0),
        ("signalled", "FAILED", 0, 9),
        ("cancelled", "CANCELLED", 0, 15),
        ("timeout", "TIMEOUT", 0, 15),
        ("node-fail", "NODE_FAIL", 0, 15),
        ("requeued", "PENDING", 0, 0),
    ],
)
def test_scontrol_tells_state_and_exit(situation, state, exit_code, signal):
    job = scontrol_job(situation)
    assert (job.state, job.exit_code, job.signal) == (state, exit_code, signal)
    assert job.restart == (1 if situation == "requeued" else 0)


def test_a_job_name_cannot_pass_for_a_field():
    job = scontrol_job("odd-name")
    assert (job.state, job.name) == ("PENDING", "has a|bar and JobState=RUNNING")


def test_scontrol_finds_one_task_of_an_array():
    job = scontrol_job("array-task")
    assert (job.job_id, job.state) == ("34_0", "PENDING")
    assert parse_scontrol_job(SCONTROL["array"]["stdout"], "35") is None


# sacct


@pytest.mark.parametrize(
    ("situation", "job_id", "state", "exit_code", "cancelled_by"),
    [
        ("completed", "44", "COMPLETED", 0, None),
        ("failed", "45", "FAILED", 3, None),
        ("cancelled", "46", "CANCELLED", 0, "0"),
        ("timeout", "47", "TIMEOUT", 0, None),
        ("running", "48", "PENDING", 0, None),
        ("array-task", "49_1", "COMPLETED", 0, None),
    ],
)
def test_sacct_tells_state_exit_and_who_cancelled(situation, job_id, state, exit_code, cancelled_by):
    job = parse_sacct(SACCT[situation]["stdout"])[job_id]
    assert (job.state, job.exit_code, job.cancelled_by) == (state, exit_code, cancelled_by)


@pytest.mark.parametrize("situation", ["unknown", "other-user"])
def test_sacct_without_such_a_job(situation):
    assert "45" not in parse_sacct(SACCT[situation]["stdout"])


# Who answered, and who did not


@pytest.mark.parametrize("command", ["sbatch", "squeue", "scontrol", "scancel", "sinfo"])
def test_only_a_silent_controller_is_called_unreachable(command):
    for situation, answer in recorded(command).items():
        assert says_unreachable(answer["stderr"]) == situation.startswith("controller-"), situation


def test_a_missing_munge_is_unreachable():  # seen with a stopped munged
    said = 'error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory'
    assert says_unreachable(said)


@pytest.mark.parametrize(
    ("printed", "is_gone"),
    [
        (SCONTROL["unknown"]["stderr"], True),
        (SQUEUE["controller-down"]["stderr"], False),
        ("\nJob 6_1 not found\n", True),  # of a task of an array, on stdout
        ("\nJob steps not found\n", False),
    ],
)
def test_a_job_nobody_knows_is_told_from_a_silent_controller(printed, is_gone):
    assert says_no_such_job(printed) == is_gone


@pytest.mark.parametrize(("state", "is_running", "is_over"), [(UNKNOWN, 0, 0), (GONE, 0, 1), ("BRAND_NEW", 1, 0)])
def test_what_is_not_known_is_not_over_and_a_job_that_is_gone_is(state, is_running, is_over):
    job = JobState(job_id="1", state=state)
    assert (job.is_pending, job.is_running, job.is_over) == (False, is_running, is_over)


# Sentences


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Resources", "waiting for free nodes (Resources)"),
        ("", "waiting for the scheduler to look at it"),
        ("QOSMaxJobsPerUserLimit", "a limit of its QOS is reached (QOSMaxJobsPerUserLimit)"),
        ("AssocGrpGRES", "a limit of its account is reached (AssocGrpGRES)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-3]",
            "nodes it needs are down, drained or reserved: n[1-3] (ReqNodeNotAvail)",
        ),
        ("ReqNodeNotAvail", "nodes it needs are down, drained or reserved (ReqNodeNotAvail)"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes it needs are down, drained, or kept for other partitions",
        ),
        ("BrandNewReason", "waiting; Slurm's reason is BrandNewReason"),
    ],
)
def test_why_a_job_waits(reason, sentence):
    assert pending_sentence(reason) == sentence


def test_every_recorded_pending_reason_has_a_sentence_of_its_own():
    reasons = [job.reason for job in parse_squeue(SQUEUE["me"]["stdout"]) if job.is_pending]
    assert len(set(reasons)) == 7
    assert not any("Slurm's reason is" in pending_sentence(reason) for reason in reasons)


@pytest.mark.parametrize(
    ("situation", "sentence"),
    [
        ("failed", "its script exited with code 3 (FAILED)"),
        ("signalled", "its script was ended by signal 9 (FAILED)"),
        ("no-output-folder", "the node could not open its output file /nonexistent/39.log (FAILED)"),
        ("timeout", "Slurm ended it at its time limit (TIMEOUT)"),
        ("node-fail", "a node of it failed (NODE_FAIL)"),
        ("cancelled", "it was cancelled (CANCELLED)"),
    ],
)
def test_how_a_job_ended(situation, sentence):
    assert ended_sentence(scontrol_job(situation)) == sentence


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "FAILED"])
def test_slurms_mark_of_a_lack_of_memory_is_no_signal(state):
    text = SCONTROL["signalled"]["stdout"].replace("JobState=FAILED", f"JobState={state}")
    text = text.replace("ExitCode=0:9", "ExitCode=0:125")
    job = parse_scontrol_job(text, "38")
    assert (job.state, job.signal) == (state, 125)
    assert ended_sentence(job) == f"it used more memory than it had asked Slurm for ({state})"


REFUSED = (  # what a job that sbatch refused leaves in the controller: ExitCode 0:1, and no node
    "JobId=40 JobName=hpc-serve-8b UserId=alice(0) JobState=FAILED Reason={} Requeue=1 Restarts=0 ExitCode=0:1 "
    "RunTime=00:00:00 StartTime=2026-11-21T02:11:36 EndTime=2026-11-21T02:11:36 NodeList={} StdOut=/home/alice/40.log"
)


def test_a_job_that_was_refused_is_not_said_to_be_ended_by_a_signal():
    refused = parse_scontrol_job(REFUSED.format("BadConstraints", "(null)"), "40")
    assert ended_sentence(refused) == (
        "Slurm refused it when it was submitted: no node can ever satisfy its constraints (FAILED)"
    )
    accounted = JobState(job_id="40", state="FAILED", exit_code=0, signal=1)
    assert ended_sentence(accounted) == "Slurm refused it when it was submitted (FAILED)"
    hung_up = parse_scontrol_job(REFUSED.format("NonZeroExitCode", "n1"), "40")
    assert ended_sentence(hung_up) == "its script was ended by signal 1 (FAILED)"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionNodeLimit", "fewer --nodes"),
        ("QOSMaxWallDurationPerJobLimit", "what the limit allows"),
        ("AssocMaxNodePerJobLimit", "what the limit allows"),
        ("QOSMaxGRESPerNode", "what the limit allows"),
        ("QOSMinGRES", "what the limit allows"),
        ("AssocGrpCPUMinutesLimit", "more hours"),
        ("AssocGrpBillingMinutes", "more hours"),
        ("InvalidQOS", "--qos"),
        ("launch failed requeued held", "scontrol release 7"),
    ],
)
def test_what_to_do_about_a_reason_that_stays(reason, words):
    assert words in pending_cure(reason, "7")
    assert "not start" in pending_sentence(reason)


@pytest.mark.parametrize(
    "reason",
    [
        *("", "Resources", "Priority", "Dependency", "BeginTime", "JobHeldUser", "PartitionDown", "ReqNodeNotAvail"),
        *("AssocGrpNodeLimit", "AssocGrpCPURunMinutesLimit", "QOSGrpGRES", "QOSMaxJobsPerUserLimit", "NodeDown"),
        *("QOSMaxCpuPerUserLimit", "AssocMaxJobsLimit", "MaxJobsPerAccount", "Licenses", "None"),
    ],
)
def test_a_reason_that_may_resolve_by_itself_has_no_cure(reason):
    assert pending_cure(reason, "7") == ""


@pytest.mark.parametrize(
    ("situation", "hint"),
    [
        ("invalid-partition", "Partitions here: gpu (default), short, down, closed."),
        ("partition-not-allowed", "Partitions here: gpu (default), short"),
        ("invalid-account", "sacctmgr show associations"),
        ("invalid-qos", "set --qos"),
        ("unknown-qos", "set --qos"),
        ("too-many-gpus", "gpu: 3 nodes with gpu:h100:8"),
        ("too-much-memory", "--gpus-per-node, and mem"),
        ("unknown-gpu-type", "gpu:h100:8"),
        ("unknown-gres", "gres_type"),
        ("invalid-feature", "--constraint"),
    ],
)
def test_a_refusal_comes_with_what_to_do(situation, hint):
    assert SBATCH[situation]["exit_code"] != 0
    assert hint in refusal_hint(SBATCH[situation]["stderr"], PARTITIONS)


def test_a_refused_time_limit_lists_the_limits():  # from the documentation: the site here only warns
    said = "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)"
    assert "gpu 1-00:00:00, short 10:00" in refusal_hint(said, PARTITIONS)


def test_a_hint_does_without_the_partitions():
    assert refusal_hint(SBATCH["invalid-partition"]["stderr"], []) == "`sinfo` lists the partitions."
    assert refusal_hint(SBATCH["unknown-option"]["stderr"], PARTITIONS) == ""
