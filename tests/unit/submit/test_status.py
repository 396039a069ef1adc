"""How a replica is, by its record, its engine and Slurm together; and jobs by hand. Slurm is stood in for."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpc_serve.client.replicas.status import ProbeResult, assess_submitted
from hpc_serve.rendezvous.record import JobEnd
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import GONE, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence
from hpc_serve.submit.status.job_status import add_job_state
from hpc_serve.submit.status.status_reader import find, read_status
from tests.unit.submit.service_8b import MODEL, queued, record, submitted_job, the_one


class TestStatus:
    def test_how_far_a_job_is(self, store, slurm):
        queued(store, slurm, "PENDING", "Resources")
        assert (the_one(store).state, the_one(store).reason) == ("pending", "waiting for free nodes (Resources)")
        slurm.queue(("7", "RUNNING", "None"))
        assert (the_one(store).state, the_one(store).stage) == ("starting", "its script has begun")
        record(store)
        status = the_one(store)
        assert (status.state, status.stage, status.time_left) == ("starting", "loading weights", "1:00:00")
        slurm.be_silent()  # a fresh record is believed
        assert (the_one(store).state, the_one(store).stage) == ("starting", "loading weights")

    @pytest.mark.parametrize("published", [False, True], ids=["before its record", "after its record"])
    @pytest.mark.parametrize(
        ("state", "exit_code", "expected", "reason"),
        [
            ("TIMEOUT", "0:15", "failed", "time limit (TIMEOUT)"),
            ("NODE_FAIL", "0:15", "failed", "a node of it failed"),
            ("OUT_OF_MEMORY", "0:125", "failed", "more memory"),
            ("FAILED", "78:0", "failed", "exited with code 78"),
            ("CANCELLED", "0:15", "stopped", "it was cancelled"),
        ],
    )
    def test_an_end_that_nobody_wrote_down_is_slurm_s_to_tell(
        self, store, slurm, state, exit_code, expected, reason, published
    ):
        job = submitted_job(store, log_path=str(store.log_dir("8b") / "7.log"))
        Path(job.log_path).write_text("one\nno Python environment in /x\n")
        if published:
            record(store)
        slurm.job("7", state, exit_code=exit_code)
        status = the_one(store)
        assert status.state == expected
        assert reason in status.reason
        assert status.last_log_lines[-1] == "no Python environment in /x"
        assert (status.is_over, status.end_reported_by_job) == (True, False)
        assert status.exit_code == int(exit_code.partition(":")[0])

    def test_a_job_that_slurm_has_forgotten_is_over_but_how_is_not_known(self, store, slurm):
        submitted_job(store)
        status = the_one(store)
        assert status.state == "failed"
        assert "not known" in status.reason

    @pytest.mark.parametrize("record_age_s", [None, 500, 3 * 86_400])
    def test_silence_is_unknown_and_never_an_end(self, store, slurm, record_age_s):
        submitted_job(store)
        if record_age_s is not None:
            record(store, updated_at=time.time() - record_age_s)
        slurm.be_silent()
        report = read_status(store)
        assert report.replicas[0].state == "unknown"
        assert not report.replicas[0].is_over
        assert "does not answer" in report.problems[-1]
        assert "sacct" not in slurm.asked

    def test_one_question_tells_the_ends_of_all_jobs_that_were_not_renewed_for_days(self, store, slurm):
        days_ago = time.time() - 3 * 86_400
        for number in range(100, 1100):
            record(store, str(number), state="ready", port=1, started_at=days_ago, updated_at=days_ago)
        submitted_job(store, "1100", submitted_at=days_ago)
        ends = [f"{number}|TIMEOUT|0:0|n1|alice|hpc-serve-8b" for number in range(100, 1099)]
        slurm.account(*ends, "1100|CANCELLED by 1003|0:0||alice|hpc-serve-8b")
        reasons = {status.job_id: status.reason for status in read_status(store).replicas}
        timed_out = {reasons.pop(str(number)) for number in range(100, 1099)}
        assert timed_out == {"Slurm ended it at its time limit (TIMEOUT)"}
        assert reasons == {
            "1099": ended_sentence(JobState(job_id="1099", state=GONE)),
            "1100": "it was cancelled by user 1003 before it began (CANCELLED)",
        }
        assert slurm.asked == {"squeue": 1, "sacct": 1}

    def test_an_end_that_the_launcher_reported_is_kept_whatever_slurm_says(self, store, slurm):
        submitted_job(store)
        record(store, state="failed", failed_part="engine", reason="engine exited with 3", exit_code=3)
        slurm.be_silent()
        status = the_one(store)
        assert (status.state, status.record.failed_part, status.exit_code) == ("failed", "engine", 3)
        assert read_status(store).problems == ()

    @pytest.mark.parametrize(
        ("state", "slurm_s", "reason"),
        [
            ("stopped", "TIMEOUT", "Slurm ended it at its time limit (TIMEOUT)"),
            ("stopped", "PREEMPTED", "it was preempted by a job of higher priority (PREEMPTED)"),
            ("stopped", "CANCELLED", "it was cancelled (CANCELLED)"),
            ("stopped", "COMPLETED", "as the launcher saw it"),
            ("failed", "NODE_FAIL", "as the launcher saw it; a node of it failed (NODE_FAIL)"),
        ],
    )
    def test_what_was_behind_what_the_launcher_saw_is_slurm_s_to_tell(self, store, slurm, state, slurm_s, reason):
        record(store, state=state, reason="as the launcher saw it")
        slurm.job("7", slurm_s)
        status = the_one(store)
        assert (status.state, status.reason, status.end_reported_by_job) == (state, reason, True)

    def test_a_launcher_that_was_told_to_stop_as_a_node_failed_has_failed(self, store, slurm):
        record(store, state="stopped", reason="SIGTERM")
        slurm.job("7", "NODE_FAIL")
        assert the_one(store).sentence == "failed: a node of it failed (NODE_FAIL)"

    @pytest.mark.parametrize(
        ("state", "nodes", "told"),
        [
            ("CANCELLED", "", "stopped: it was cancelled before it began again (CANCELLED)"),
            ("FAILED", "n1", "failed: its script exited with code 1 (FAILED)"),
        ],
    )
    def test_a_job_that_was_requeued_and_said_nothing_more_ended_as_slurm_says(self, store, slurm, state, nodes, told):
        record(store, state="stopped", reason="SIGTERM")
        slurm.job("7", state, nodes=nodes, restart=1, exit_code="1:0")
        assert (the_one(store).sentence, the_one(store).restart) == (told, 1)
        record(store, restart=1, state="failed", reason="engine exited with 1", started_at=time.time() + 1)
        assert the_one(store).reason == "engine exited with 1"

    def test_accounting_knows_what_the_controller_has_forgotten(self, store, slurm):
        record(store, "7", state="stopped", reason="SIGTERM")
        record(store, "8", state="stopped", reason="SIGTERM", updated_at=time.time() - 2 * 86400)
        slurm.account("7|CANCELLED by 1003|0:15|n1|alice|hpc-serve-8b")
        reasons = {status.job_id: status.reason for status in read_status(store).replicas}
        assert reasons == {"7": "it was cancelled by user 1003 (CANCELLED)", "8": "SIGTERM"}

    def test_where_there_is_no_accounting_it_is_asked_once(self, store, slurm):
        for job_id in ("7", "8", "9"):
            record(store, job_id, state="stopped", reason="SIGTERM")
        assert {status.reason for status in read_status(store).replicas} == {"SIGTERM"}
        assert slurm.asked["sacct"] == 1

    @pytest.mark.parametrize("told_by", ["its record", "stop"])
    def test_a_requeued_job_waits_again(self, store, slurm, told_by):
        end = JobEnd(state="stopped", reason="it was cancelled", at=time.time()) if told_by == "stop" else None
        submitted_job(store, end=end)
        if told_by == "its record":
            record(store, state="stopped", reason="SIGTERM")
        slurm.queue(("7", "PENDING", "BeginTime"))
        assert the_one(store).state == "pending"

    def test_a_requeued_job_that_runs_again_is_starting_before_it_says_so_itself(self, store, slurm):
        submitted_job(store)
        record(store, state="failed", failed_part="engine", reason="x", exit_code=1)
        slurm.queue(("7", "RUNNING", "None"))
        slurm.job("7", "RUNNING", restart=1)
        status = the_one(store)
        assert (status.state, status.stage, status.restart) == ("starting", "its script has begun", 1)
        assert (status.record, status.exit_code, status.reason) == (None, None, "")
        slurm.job("7", "RUNNING", restart=0)  # the same run, whose script has not ended yet
        assert the_one(store).state == "failed"

    @pytest.mark.parametrize(
        ("reason", "is_expected"), [("Resources", True), ("JobHeldUser", False), ("job requeued in held state", False)]
    )
    def test_a_job_that_is_held_is_not_expected_to_start(self, store, slurm, reason, is_expected):
        submitted_job(store)
        job = JobState(job_id="7", state="PENDING", reason=reason, start_time="2026-11-21T05:08:59")
        assert ("expected to start" in add_job_state(assess_submitted(store.read_submitted("8b")[0]), job).reason) == (
            is_expected
        )

    def test_of_several_runs_of_a_job_the_last_counts(self, store, slurm):
        record(store, state="failed", reason="first")
        record(store, restart=1, started_at=time.time() + 1)
        slurm.queue(("7", "RUNNING", "None"))
        assert (the_one(store).restart, the_one(store).state) == (1, "starting")

    def test_a_record_that_cannot_be_read_is_told_and_hides_nothing_else(self, store, slurm):
        queued(store, slurm, "PENDING", "Priority")
        (store.service_dir("8b") / "8-r0-0.json").write_text('{"version": 1, "ser')
        report = read_status(store)
        assert [status.job_id for status in report.replicas] == ["7"]
        assert "8-r0-0.json" in report.problems[0]

    def test_without_slurm_there_is_nothing_to_complain_about(self, store, monkeypatch):
        monkeypatch.setenv("PATH", "/nonexistent")
        assert read_status(store).everywhere == ()
        assert read_status(store).problems == ()

    def test_an_engine_is_asked_before_it_is_called_ready(self, store, slurm, engines):
        slurm.queue(("7", "RUNNING", "None"))
        engine = engines.start(service="8b", model=MODEL, job_id="7")
        assert the_one(store).state == "ready"
        assert the_one(store).address == f"127.0.0.1:{engine.port}"
        engine.kill()
        status = the_one(store)
        assert status.state == "unresponsive"
        assert f"127.0.0.1:{engine.port}" in status.reason

    @pytest.mark.parametrize("probe_status", ["no answer", "unhealthy"])
    @pytest.mark.parametrize("told_by", ["its record", "Slurm"])
    def test_a_job_that_is_being_ended_is_not_called_unresponsive(
        self, store, slurm, monkeypatch, told_by, probe_status
    ):
        """The engine goes first: neither its record nor Slurm's list said anything a moment ago."""
        submitted_job(store)
        ready = record(store, state="ready", port=1)
        slurm.queue(("7", "RUNNING", "None"))

        def gone(records, key):
            if told_by == "Slurm":
                slurm.queue(("7", "COMPLETING", "None"))
            else:
                store.write(dataclasses.replace(ready, state="draining", stage="stopping", reason="SIGTERM"))
            return {one.name: ProbeResult(status=probe_status) for one in records}

        store.ensure_api_key("8b")
        monkeypatch.setattr("hpc_serve.submit.status.status_reader.probe_records", gone)
        status = the_one(store)
        assert (status.state, status.stage) == ("draining", "stopping")
        assert not status.is_over

    @pytest.mark.parametrize(("missed", "state"), [(1, "ready"), (2, "unresponsive")])
    def test_one_answer_that_is_missed_makes_no_engine_unresponsive(self, store, slurm, monkeypatch, missed, state):
        submitted_job(store)
        record(store, state="ready", port=1)
        slurm.queue(("7", "RUNNING", "None"))
        answers: list[ProbeResult] = [ProbeResult(status="no answer")] * missed
        well = ProbeResult(status="ready", host="127.0.0.1")
        store.ensure_api_key("8b")
        monkeypatch.setattr(
            "hpc_serve.submit.status.status_reader.probe_records",
            lambda records, key: {one.name: answers.pop() if answers else well for one in records},
        )
        assert the_one(store).state == state
        assert not answers

    def test_a_silent_engine_is_worth_one_more_question_to_slurm(self, store, slurm):
        store.ensure_api_key("8b")
        record(store, state="ready", port=1)
        slurm.queue(("7", "RUNNING", "None"))
        view = SchedulerView()
        for _ in range(3):
            assert read_status(store, slurm=view).replicas[0].state == "unresponsive"
        assert slurm.asked["squeue"] == 2


class TestSlurmBesideARecordThatIsNotRenewed:
    """An hour without a renewal: the client calls such a replica unknown, and Slurm may know more."""

    @pytest.fixture
    def old(self, store):
        return record(store, updated_at=time.time() - 3600)

    def test_slurm_says_what_became_of_it(self, store, slurm, old):
        slurm.queue(("7", "RUNNING", "None"))
        unrenewed = "its record has not been renewed for 1 h; it was loading weights"
        assert the_one(store).sentence == f"unresponsive: {unrenewed}; its job still runs"
        assert not the_one(store).is_over
        slurm.queue(("7", "SUSPENDED", "None"))
        assert the_one(store).sentence == "unresponsive: Slurm has suspended its job (SUSPENDED)"
        slurm.queue(("7", "COMPLETING", "None"))
        assert (the_one(store).state, the_one(store).stage) == ("draining", "stopping")
        slurm.queue()
        slurm.job("7", "TIMEOUT")
        assert the_one(store).state == "failed"
        slurm.be_silent()
        assert the_one(store).state == "unknown"
        assert the_one(store).reason.startswith(f"{unrenewed}, and ")

    def test_a_record_that_is_a_little_late_says_so(self, store, slurm, monkeypatch):
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now)
        record(store, updated_at=now - 200)
        slurm.queue(("7", "RUNNING", "None"))
        status = the_one(store)
        assert (status.state, status.stage) == ("starting", "loading weights")
        assert "its record was last renewed 20" in status.reason


def test_a_job_submitted_by_hand_is_known_by_its_name(store, slurm):
    slurm.name_in_queue("9", "hpc-serve-70b")
    slurm.name_in_queue("10", "something-else")
    slurm.name_in_queue("11", "hpc-serve-not a name")
    status = the_one(store)
    assert (status.service, status.job_id, status.state) == ("70b", "9", "pending")
    assert read_status(store, "8b").everywhere == ()


def test_a_running_job_without_a_record_may_have_another_home(store, slurm):
    slurm.queue(("9", "RUNNING", "None"), name="hpc-serve-70b")
    assert (the_one(store).state, the_one(store).stage) == ("starting", "its script has begun")
    slurm.queue(("9", "RUNNING", "None"), name="hpc-serve-70b", run_time="1:05:00")
    status = the_one(store)
    assert status.state == "unknown"
    assert status.reason == (
        f"Slurm runs it, but there is no record of it in {store.home} after 65 min: "
        "its script has not come so far, or it has another HPC_SERVE_HOME"
    )
    submitted_job(store, "9", service="70b")
    assert (the_one(store).state, the_one(store).stage) == ("starting", "its script has begun")
    assert "after 65 min" in the_one(store).reason


def test_a_job_of_another_home_is_told_by_where_its_output_goes(store, slurm):
    slurm.queue(("9", "RUNNING", "None"), name="hpc-serve-70b", run_time="1:05:00")
    slurm.job("9", "RUNNING", log="/elsewhere/services/70b/logs/9.log")
    assert the_one(store).reason == (
        f"Slurm runs it, but its records are not in {store.home}: set HPC_SERVE_HOME=/elsewhere"
    )
    slurm.queue()
    slurm.job("9", "FAILED", name="hpc-serve-70b", log="/elsewhere/services/70b/logs/9.log")
    assert read_status(store).everywhere == ()
    slurm.job("9", "FAILED", name="hpc-serve-70b", log=str(store.log_dir("70b") / "9.log"))
    assert the_one(store).state == "failed"


def test_a_job_submitted_by_hand_is_stopped_too(store, slurm):
    slurm.name_in_queue("9", "hpc-serve-70b")
    slurm.job("9", "CANCELLED", after_cancel=True)
    (status,) = stopping.stop(store, find(store, "70b"))
    assert status.state == "stopped"
    assert slurm.cancelled == ["9"]
