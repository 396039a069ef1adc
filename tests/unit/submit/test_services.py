"""Submitting, judging, waiting for and stopping services, against stand-ins for Slurm's commands."""

from __future__ import annotations

import contextlib
import dataclasses
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus
from hpc_serve.errors import (
    DoesNotFitError,
    InvalidRequestError,
    SchedulerUnavailableError,
    ServiceConflictError,
    ServiceFailedError,
    ServiceNotFoundError,
    StoreError,
    SubmissionRefusedError,
    UnknownModelError,
    WaitTimeoutError,
)
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.rendezvous.claims import claim
from hpc_serve.rendezvous.drain import DrainRequest, drain_file, read_drain_request
from hpc_serve.rendezvous.record import JobEnd, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.diagnosis import diagnosis
from hpc_serve.submit.logs.log_files import files_of
from hpc_serve.submit.plans.planned_speed import planned_tokens_per_s
from hpc_serve.submit.request.environment import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.request.sbatch_options import SlurmOptions
from hpc_serve.submit.services import hand_over, services, wait
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import GONE, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence
from hpc_serve.submit.status.status_reader import find, read_status
from tests.cluster import wait_for
from tests.support.stubs import StubService, make_record, make_submitted

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def environ(store, slurm, tmp_path):
    """What `submit` is told: a home, and an environment for the job."""
    return {"HPC_SERVE_HOME": str(store.home), "HPC_SERVE_ENV": str(tmp_path / "env")}


@pytest.fixture
def stubs(store):
    """Engines of the service 8b."""
    service = StubService(store.home, "8b")
    yield service
    service.close()


def request(**fields) -> ServeRequest:
    return ServeRequest(**{"model": "8b", "service": "8b", **fields})


def submitted_job(store: ServiceStore, job_id: str = "7", **fields) -> SubmittedJob:
    job = make_submitted(**{"service": "8b", "model": MODEL, "job_id": job_id, **fields})
    store.write_submitted(job)
    return job


def record(store: ServiceStore, job_id: str = "7", **fields):
    usual = {"service": "8b", "model": MODEL, "job_id": job_id, "state": "starting", "stage": "loading weights"}
    made = make_record(**{**usual, **fields})
    store.write(made)
    return made


def the_one(store: ServiceStore) -> ReplicaStatus:
    (status,) = read_status(store).everywhere
    return status


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class TestSubmit:
    def test_a_job_is_submitted_and_written_down(self, store, slurm, environ):
        done = services.submit(request(slurm=SlurmOptions(partition="gpu")), environ=environ)
        assert (done.job.job_id, done.job.model, done.job.gpus_per_node) == ("101", MODEL, 1)
        assert store.read_submitted("8b") == (done.job,)
        (script,) = slurm.scripts
        assert script == Path(done.job.script or "").read_text()
        assert stat.S_IMODE(Path(done.job.script or "").parent.stat().st_mode) == 0o700
        assert "#SBATCH --partition=gpu\n" in script
        assert f"#SBATCH --output={store.log_dir('8b')}/%j.log\n" in script
        assert done.job.log_path == str(store.log_dir("8b") / "101.log")
        assert store.read_api_key("8b") not in script
        assert done.job.predicted["weight_bytes"] > 16e9
        assert planned_tokens_per_s(done.job.predicted, 1) > 0

    def test_the_log_folder_asked_for_is_made(self, store, slurm, environ, tmp_path):
        done = services.submit(request(log_dir=str(tmp_path / "a" / "logs")), environ=environ)
        assert done.job.log_path == str(tmp_path / "a" / "logs" / "101.log")
        assert (tmp_path / "a" / "logs").is_dir()

    def test_what_the_service_has_already_is_told(self, store, slurm, environ):
        first = services.submit(request(), environ=environ)
        assert first.others == ()
        slurm.name_in_queue("55", "hpc-serve-8b")  # submitted by hand
        second = services.submit(request(), environ=environ)
        assert sorted((one.job_id, one.state) for one in second.others) == [("101", "pending"), ("55", "pending")]
        slurm.queue()
        slurm.job("101", "CANCELLED")
        slurm.job("102", "FAILED", exit_code="1:0")
        third = services.submit(request(), environ=environ)
        assert third.others == ()

    def test_a_refused_job_leaves_no_claim_and_no_note(self, store, slurm, environ):
        slurm.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
        with pytest.raises(SubmissionRefusedError, match="Invalid qos specification"):
            services.submit(request(), environ=environ)
        assert files(store.service_dir("8b")) == {"api_key"}
        (slurm.bin.parent / "refusal").unlink()
        services.submit(request(model="70b"), environ=environ)  # the name is free for another model

    @pytest.mark.parametrize(
        ("reason", "words"),
        [
            ("PartitionConfig", ["--nodes=1 --time=12:00:00", "gpu 1-00:00:00", "gpu: 3 nodes with gpu:h100:8"]),
            ("PartitionNodeLimit", ["more nodes than its partition allows (PartitionNodeLimit)", "gpu: 3 nodes"]),
            ("PartitionTimeLimit", ["more time than its partition allows", "Time limits here: gpu 1-00:00:00"]),
            ("QOSMaxWallDurationPerJobLimit", ["QOS does not allow one job so much", "--time"]),
        ],
    )
    def test_a_job_that_slurm_says_will_never_start_is_refused(self, store, slurm, environ, reason, words):
        slurm.job("101", "PENDING", reason=reason)
        with pytest.raises(SubmissionRefusedError, match="never start the job, so it was cancelled") as refused:
            services.submit(request(), environ=environ)
        assert all(word in str(refused.value) for word in words)
        assert slurm.cancelled == ["101"]
        assert files(store.service_dir("8b")) == {"api_key", "101.forgotten"}
        slurm.job("101", "CANCELLED", name="hpc-serve-8b", nodes="", log=str(store.log_dir("8b") / "101.log"))
        assert read_status(store).everywhere == ()
        services.submit(request(model="70b"), environ=environ)  # the name is free for another model
        slurm.job("103", "PENDING", reason=reason)
        with pytest.raises(SubmissionRefusedError):
            hand_over.add_jobs(store, "8b", 1)
        assert [job.job_id for job in store.read_submitted("8b")] == ["102"]

    @pytest.mark.parametrize(
        ("reason", "partition"),
        [
            *((reason, "gpu") for reason in ("Resources", "PartitionDown", "AssocGrpCPUMinutesLimit", "JobHeldUser")),
            ("PartitionNodeLimit", "gpu,small"),
            ("PartitionConfig", "small,gpu"),
        ],
    )
    def test_one_that_may_start_after_all_is_left_in_the_queue(self, store, slurm, environ, reason, partition):
        slurm.job("101", "PENDING", reason=reason, partition=partition)
        assert services.submit(request(), environ=environ).job_id == "101"
        assert slurm.cancelled == []

    def test_a_controller_that_falls_silent_after_sbatch_refuses_nothing(self, store, slurm, environ):
        (slurm.bin / "scontrol").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        assert services.submit(request(), environ=environ).job_id == "101"

    def test_what_cannot_be_written_down_is_not_left_running(self, store, slurm, environ, monkeypatch):
        def full(*_):
            raise StoreError("the filesystem is full")

        monkeypatch.setattr(ServiceStore, "write_submitted", full)
        with pytest.raises(StoreError, match="full"):
            services.submit(request(), environ=environ)
        assert slurm.cancelled == ["101"]
        assert "service.json" not in files(store.service_dir("8b"))

    @pytest.mark.parametrize(
        ("fields", "error", "words"),
        [
            ({"model": "8bb"}, UnknownModelError, "8bb"),
            ({"model": "70b", "tensor_parallel_size": 7, "num_nodes": 1}, DoesNotFitError, "7"),
            ({"model": "405b", "num_nodes": 1}, DoesNotFitError, "does not fit"),
            ({"log_dir": "/dev/null/x"}, StoreError, "--log-dir"),
            ({"environment": Environment(kind="venv", path="/nonexistent")}, InvalidRequestError, "/nonexistent"),
            ({"environment": Environment(kind="apptainer", path="/no.sif")}, InvalidRequestError, "/no.sif"),
            ({"environment": Environment(kind="pyxis", path="/no.sqsh")}, InvalidRequestError, "/no.sqsh"),
            ({"environment": Environment(kind="charliecloud", path="/no/image")}, InvalidRequestError, "/no/image"),
            ({"engine_args": ("--max-num-seqs", "many")}, InvalidRequestError, "--max-num-seqs is 'many'"),
        ],
    )
    def test_what_cannot_work_is_refused_before_anything_happens(self, store, slurm, environ, fields, error, words):
        with pytest.raises(error, match=words):
            services.submit(request(**fields), environ=environ)
        assert slurm.scripts == []
        assert not files(store.home)

    @pytest.mark.parametrize(
        ("files", "engine_args", "words"),
        [
            (None, (), "not a folder"),
            ({}, (), "no config.json"),
            ({"config.json": "{}"}, (), "holds no weights"),
            ({"config.json": "{}"}, ("--load-format", "dummy"), ""),
            ({"config.json": "{}", "hpc-serve-args.txt": "--load-format dummy\n"}, (), ""),
            ({"config.json": "{}", "hpc-serve-args.txt": "# no dummy weights\n"}, (), "holds no weights"),
            ({"config.json": "{}", "hpc-serve-args.txt": "--served-model-name dummy\n"}, (), "holds no weights"),
            (
                {"config.json": "{}", "hpc-serve-args.txt": "--load-format dummy --worker-cls a.B\n"},
                (),
                r"hpc-serve-args\.txt holds --worker-cls",
            ),
        ],
    )
    def test_the_folder_of_a_stand_in_is_looked_at_before_the_queue(
        self, store, slurm, environ, tmp_path, files, engine_args, words
    ):
        """Random weights need no files: as an option, or in the folder's file of options."""
        if files is not None:
            (tmp_path / "model").mkdir()
        for name, text in (files or {}).items():
            (tmp_path / "model" / name).write_text(text)
        asked, environ = request(engine_args=engine_args), environ | {"HPC_SERVE_MODEL": str(tmp_path / "model")}
        with pytest.raises(InvalidRequestError, match=words) if words else contextlib.nullcontext():
            services.submit(asked, environ=environ)
        assert len(slurm.scripts) == (not words)

    def test_without_an_environment_nothing_is_queued(self, store, slurm, environ, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InvalidRequestError, match="set HPC_SERVE_ENV"):
            services.submit(request(), environ={"HPC_SERVE_HOME": str(store.home)})
        assert slurm.scripts == []

    def test_a_name_is_one_model_s_as_long_as_its_job_may_live(self, store, slurm, environ):
        services.submit(request(), environ=environ)
        with pytest.raises(ServiceConflictError, match="job 101"):
            services.submit(request(model="70b"), environ=environ)
        assert len(slurm.scripts) == 1
        services.submit(request(), environ=environ)  # the same model: another replica
        slurm.queue()
        for job_id in ("101", "102"):
            slurm.job(job_id, "CANCELLED")
        services.submit(request(model="70b"), environ=environ)
        assert len(slurm.scripts) == 3

    def test_a_silent_controller_frees_no_name(self, store, slurm, environ):
        services.submit(request(), environ=environ)
        slurm.be_silent()
        with pytest.raises(ServiceConflictError):
            services.submit(request(model="70b"), environ=environ)
        with pytest.raises(SchedulerUnavailableError):
            services.submit(request(), environ=environ)


class TestStatus:
    def test_how_far_a_job_is(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Resources"))
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
        Path(job.log_path or "").write_text("one\nno Python environment in /x\n")
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

    @pytest.mark.parametrize("with_record", [False, True])
    def test_silence_is_unknown_and_never_an_end(self, store, slurm, with_record):
        submitted_job(store)
        if with_record:
            record(store, updated_at=time.time() - 500)
        slurm.be_silent()
        report = read_status(store)
        assert report.replicas[0].state == "unknown"
        assert not report.replicas[0].is_over
        assert "does not answer" in report.problems[-1]

    def test_one_question_tells_the_ends_of_all_jobs_that_were_not_renewed_for_days(self, store, slurm):
        days_ago = time.time() - 3 * 86_400
        for number in range(100, 1100):
            record(store, str(number), state="ready", port=1, started_at=days_ago, updated_at=days_ago)
        submitted_job(store, "1100", submitted_at=days_ago)
        ends = [f"{number}|TIMEOUT|0:0|n1|alice|hpc-serve-8b" for number in range(100, 1099)]
        slurm.account(*ends, "1100|CANCELLED by 1003|0:0||alice|hpc-serve-8b")
        reasons = {status.job_id: status.reason for status in read_status(store).replicas}
        assert {reasons.pop(str(number)) for number in range(100, 1099)} == {
            "Slurm ended it at its time limit (TIMEOUT)"
        }
        assert reasons == {
            "1099": ended_sentence(JobState(job_id="1099", state=GONE)),
            "1100": "it was cancelled by user 1003 before it began (CANCELLED)",
        }
        assert slurm.asked == {"squeue": 1, "sacct": 1}

    def test_a_silent_controller_says_nothing_of_jobs_that_were_not_renewed_for_days(self, store, slurm):
        record(store, state="ready", port=1, updated_at=time.time() - 3 * 86_400)
        slurm.be_silent()
        assert the_one(store).state == "unknown"
        assert "sacct" not in slurm.asked

    def test_an_end_that_the_launcher_reported_is_kept_whatever_slurm_says(self, store, slurm):
        submitted_job(store)
        record(store, state="failed", failed_part="engine", reason="engine exited with 3", exit_code=3)
        slurm.be_silent()
        status = the_one(store)
        assert (status.state, status.record.failed_part, status.exit_code) == ("failed", "engine", 3)
        assert read_status(store).problems == ()

    @pytest.mark.parametrize(
        ("state", "reason"),
        [
            ("TIMEOUT", "Slurm ended it at its time limit (TIMEOUT)"),
            ("PREEMPTED", "it was preempted by a job of higher priority (PREEMPTED)"),
            ("CANCELLED", "it was cancelled (CANCELLED)"),
            ("COMPLETED", "SIGTERM (cancelled, preempted, or out of time)"),
        ],
    )
    def test_what_was_behind_a_signal_is_slurm_s_to_tell(self, store, slurm, state, reason):
        record(store, state="stopped", reason="SIGTERM (cancelled, preempted, or out of time)")
        slurm.job("7", state)
        status = the_one(store)
        assert (status.state, status.reason, status.end_reported_by_job) == ("stopped", reason, True)

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

    def test_a_node_that_failed_is_told_beside_what_the_launcher_saw(self, store, slurm):
        record(store, state="failed", failed_part="node n2", reason="its launcher fell silent", exit_code=1)
        slurm.job("7", "NODE_FAIL")
        assert the_one(store).reason == "its launcher fell silent; a node of it failed (NODE_FAIL)"

    def test_a_requeued_job_waits_again(self, store, slurm):
        submitted_job(store)
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

    def test_of_several_runs_of_a_job_the_last_counts(self, store, slurm):
        record(store, state="failed", reason="first")
        record(store, restart=1, started_at=time.time() + 1)
        slurm.queue(("7", "RUNNING", "None"))
        assert (the_one(store).restart, the_one(store).state) == (1, "starting")

    def test_a_job_submitted_by_hand_is_known_by_its_name(self, store, slurm):
        slurm.name_in_queue("9", "hpc-serve-70b")
        slurm.name_in_queue("10", "something-else")
        slurm.name_in_queue("11", "hpc-serve-not a name")
        status = the_one(store)
        assert (status.service, status.job_id, status.state) == ("70b", "9", "pending")
        assert read_status(store, "8b").everywhere == ()

    def test_a_job_submitted_by_hand_that_failed_before_it_could_say_so_is_known(self, store, slurm, tmp_path):
        log = tmp_path / "hpc-serve-70b-9.log"
        log.write_text("no Python environment\n")
        slurm.job("9", "FAILED", exit_code="78:0", name="hpc-serve-70b", log=str(log))
        slurm.job("10", "FAILED", exit_code="1:0", name="something-else")
        status = the_one(store)
        assert (status.service, status.job_id, status.state, status.exit_code) == ("70b", "9", "failed", 78)
        assert status.reason == f"its script exited with code 78: {exit_code_words(78)} (FAILED)"
        assert (files_of(status), status.last_log_lines) == ([log], ("no Python environment",))
        assert status.updated_at is not None

    def test_a_running_job_without_a_record_may_have_another_home(self, store, slurm):
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

    def test_a_job_of_another_home_is_told_by_where_its_output_goes(self, store, slurm):
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

    def test_a_record_that_cannot_be_read_is_told_and_hides_nothing_else(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Priority"))
        (store.service_dir("8b") / "8-r0-0.json").write_text('{"version": 1, "ser')
        report = read_status(store)
        assert [status.job_id for status in report.replicas] == ["7"]
        assert "8-r0-0.json" in report.problems[0]

    def test_without_slurm_there_is_nothing_to_complain_about(self, store, monkeypatch):
        monkeypatch.setenv("PATH", "/nonexistent")
        assert read_status(store).everywhere == ()
        assert read_status(store).problems == ()

    def test_an_engine_is_asked_before_it_is_called_ready(self, store, slurm, stubs):
        slurm.queue(("7", "RUNNING", "None"))
        engine = stubs.start(service="8b", model=MODEL, job_id="7")
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

    def test_a_silent_engine_is_worth_one_more_question_to_slurm(self, store, slurm, monkeypatch):
        store.ensure_api_key("8b")
        record(store, state="ready", port=1)
        slurm.queue(("7", "RUNNING", "None"))
        asked = []
        real = scheduler.jobs
        monkeypatch.setattr(scheduler, "jobs", lambda: asked.append(1) or real())
        view = SchedulerView()
        for _ in range(3):
            assert read_status(store, slurm=view).replicas[0].state == "unresponsive"
        assert len(asked) == 2

    def test_an_engine_that_answers_is_ready_though_the_controller_is_silent(self, store, slurm, stubs):
        slurm.be_silent()
        stubs.start(service="8b", model=MODEL, job_id="7")
        assert the_one(store).state == "ready"


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


class TestWait:
    def test_the_stages_are_shown_and_a_failure_ends_it_with_the_last_log_lines(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Priority"))
        told = []

        def go_on(status: ReplicaStatus) -> None:
            told.append((status.state, status.stage))
            if status.state == "pending":
                slurm.queue(("7", "RUNNING", "None"))
            elif status.stage == "its script has begun":
                record(store)
            elif status.stage == "loading weights":
                words = ("Traceback", "ValueError: no memory")
                record(store, state="failed", failed_part="engine", reason="engine exited with 1", last_log_lines=words)

        with pytest.raises(ServiceFailedError) as caught:
            wait.wait(store, "8b", timeout_s=60, on_change=go_on)
        assert told[:3] == [("pending", ""), ("starting", "its script has begun"), ("starting", "loading weights")]
        assert "8b (job 7) failed: engine exited with 1" in str(caught.value)
        assert "ValueError: no memory" in str(caught.value)

    def test_the_record_of_an_end_is_waited_for_when_slurm_is_quicker(self, store, slurm, monkeypatch):
        monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 60.0)
        submitted_job(store)
        slurm.job("7", "FAILED", exit_code="3:0")

        def write_it(status: ReplicaStatus) -> None:
            record(store, state="failed", failed_part="engine", reason="the real reason")

        with pytest.raises(ServiceFailedError, match="the real reason"):
            wait.wait(store, "8b", on_change=write_it)

    def test_not_ready_in_time_is_no_failure(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Priority"))
        with pytest.raises(WaitTimeoutError, match="its job goes on: pending: waiting behind"):
            wait.wait(store, "8b", timeout_s=0)

    @pytest.mark.parametrize("reason", ["PartitionNodeLimit", "QOSMaxNodePerJobLimit", "DependencyNeverSatisfied"])
    def test_a_job_that_will_never_start_ends_the_wait(self, store, slurm, reason):
        submitted_job(store)
        slurm.queue(("7", "PENDING", reason))
        with pytest.raises(ServiceFailedError, match=rf"never|not start by itself.*\({reason}\)") as failed:
            wait.wait(store, "8b", timeout_s=60)
        assert "Submit it with" in str(failed.value)
        assert str(failed.value).endswith("hpc-serve stop 7")

    def test_what_the_partitions_have_is_said_with_it(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "PartitionTimeLimit"))
        with pytest.raises(ServiceFailedError, match=r"Time limits here: gpu 1-00:00:00\."):
            wait.wait(store, "8b", timeout_s=60)
        (slurm.bin / "sinfo").write_text("#!/bin/bash\nexit 1\n")
        with pytest.raises(ServiceFailedError, match="more time than its partition allows"):
            wait.wait(store, "8b", timeout_s=60)

    def test_a_limit_of_one_of_several_partitions_does_not_end_the_wait(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "PartitionNodeLimit"), partition="gpu,small")
        with pytest.raises(WaitTimeoutError, match=r"one of its partitions \(gpu,small\) cannot run it"):
            wait.wait(store, "8b", timeout_s=0)

    def test_another_job_of_the_service_is_waited_for(self, store, slurm):
        submitted_job(store, "7")
        submitted_job(store, "8")
        slurm.queue(("7", "PENDING", "Resources"), ("8", "PENDING", "PartitionNodeLimit"))
        with pytest.raises(WaitTimeoutError, match="waiting for free nodes"):
            wait.wait(store, "8b", timeout_s=0)
        with pytest.raises(ServiceFailedError, match="job 8"):
            wait.wait(store, "8b", replicas=2, timeout_s=60)

    def test_an_older_failure_does_not_end_the_wait_for_a_new_job(self, store, slurm):
        submitted_job(store, "7", submitted_at=time.time() - 100)
        submitted_job(store, "8")
        slurm.job("7", "FAILED", exit_code="1:0")
        slurm.queue(("8", "PENDING", "Priority"))
        with pytest.raises(WaitTimeoutError, match="pending"):
            wait.wait(store, "8b", timeout_s=0)

    def test_an_unknown_service_is_not_waited_for(self, store, slurm):
        submitted_job(store)
        with pytest.raises(ServiceNotFoundError, match=r"There is:\n  8b: "):
            wait.wait(store, "70b")


def stop(store: ServiceStore, target: str, **options) -> tuple[ReplicaStatus, ...]:
    return stopping.stop(store, find(store, target), **options)


class Replica:
    """A replica of job 7 that is ready, and what asks it to drain."""

    def __init__(self, store: ServiceStore, service: StubService) -> None:
        service.start(service="8b", model=MODEL, job_id="7")
        (self.record,) = store.read("8b").records
        self.path = drain_file(store, "8b", "7-r0-0.json")

    @contextlib.contextmanager
    def asked(self, answer: Callable[[DrainRequest], None]) -> Iterator[None]:
        """Have `answer` called once it is asked."""

        def watch() -> None:
            answer(wait_for(lambda: read_drain_request(self.path), 60))

        watching = threading.Thread(target=watch)
        watching.start()
        yield
        watching.join()


@pytest.fixture
def replica(store, slurm, stubs):
    submitted_job(store)
    slurm.queue(("7", "RUNNING", "None"))
    slurm.job("7", "RUNNING")
    return Replica(store, stubs)


class TestStop:
    def test_a_job_is_cancelled_and_its_end_waited_for(self, store, slurm):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Priority"))
        slurm.job("7", "CANCELLED", after_cancel=True)
        (status,) = stop(store, "8b")
        assert slurm.cancelled == ["7"]
        assert status.state == "stopped"

    def test_a_replica_that_serves_is_asked_to_drain_and_ends_by_itself(self, store, slurm, replica):
        seen = []

        def finish(request: DrainRequest) -> None:
            seen.append((request.by.split(" on ")[0], request.deadline_s))
            slurm.job("7", "COMPLETED")
            store.write(dataclasses.replace(replica.record, state="stopped", reason="asked; 3 requests finished"))

        with replica.asked(finish):
            (status,) = stop(store, "8b", drain_s=60)
        assert seen == [("hpc-serve stop", 60)]
        assert slurm.cancelled == []
        assert (status.state, status.reason) == ("stopped", "asked; 3 requests finished")

    def test_one_that_has_not_ended_after_its_drain_is_cancelled(self, store, slurm, replica, monkeypatch):
        monkeypatch.setattr(stopping, "_WAY_DOWN_S", 0.1)
        slurm.job("7", "CANCELLED", after_cancel=True)
        (status,) = stop(store, "8b", drain_s=0.1)
        assert slurm.cancelled == ["7"]
        assert status.state == "stopped"

    def test_now_asks_for_no_drain_and_cancels_at_once(self, store, slurm, replica):
        slurm.job("7", "CANCELLED", after_cancel=True)
        stop(store, "8b", drain_s=0)
        assert slurm.cancelled == ["7"]
        request = read_drain_request(replica.path)
        assert request is not None
        assert request.deadline_s == 0

    @pytest.mark.parametrize(
        "fields",
        [{}, {"state": "unresponsive", "stage": "unresponsive", "reason": "its engine leaves /health unanswered"}],
    )
    def test_one_that_does_not_serve_is_cancelled_at_once(self, store, slurm, fields):
        submitted_job(store)
        record(store, **fields)
        slurm.queue(("7", "RUNNING", "None"))
        slurm.job("7", "CANCELLED", after_cancel=True)
        stop(store, "8b")
        assert slurm.cancelled == ["7"]
        assert not list(store.service_dir("8b").glob("*.drain"))

    @pytest.mark.parametrize("by", ["stop", "scancel"])
    def test_a_job_that_never_began_stays_known_as_cancelled(self, store, slurm, by):
        submitted_job(store)
        slurm.queue(("7", "PENDING", "Priority"))
        slurm.job("7", "CANCELLED", after_cancel=True, nodes="")
        if by == "scancel":
            scheduler.cancel("7")
        stop(store, "8b")
        slurm.forget("7")
        status = the_one(store)
        assert (status.state, status.reason) == ("stopped", "it was cancelled before it began (CANCELLED)")
        assert store.read("8b").awaiting_record() == ()
        claim(store, "8b", "another-model")  # its name is free

    def test_what_a_job_without_a_record_left_is_known_after_slurm_has_forgotten_it(self, store, slurm):
        job = submitted_job(store, log_path=str(store.log_dir("8b") / "7.log"))
        Path(job.log_path or "").write_text("no Python environment in /x\n")
        slurm.job("7", "FAILED", exit_code="78:0")
        stop(store, "8b")
        slurm.forget("7")
        status = the_one(store)
        assert (status.state, status.exit_code) == ("failed", 78)
        assert status.reason == f"its script exited with code 78: {exit_code_words(78)} (FAILED)"
        assert status.last_log_lines == ("no Python environment in /x",)

    def test_a_job_whose_end_is_written_down_and_that_was_requeued_is_in_the_queue(self, store, slurm):
        submitted_job(store, end=JobEnd(state="stopped", reason="it was cancelled", at=time.time()))
        slurm.queue(("7", "PENDING", "Priority"))
        assert the_one(store).state == "pending"

    def test_a_job_submitted_by_hand_is_stopped_too(self, store, slurm):
        slurm.name_in_queue("9", "hpc-serve-70b")
        slurm.job("9", "CANCELLED", after_cancel=True)
        (status,) = stop(store, "70b")
        assert status.state == "stopped"
        assert slurm.cancelled == ["9"]

    def test_what_is_over_is_left_alone(self, store, slurm):
        submitted_job(store)
        record(store, state="stopped")
        assert stop(store, "8b") == ()
        assert slurm.cancelled == []

    def test_a_job_that_does_not_end_is_told(self, store, slurm):
        submitted_job(store)
        slurm.job("7", "RUNNING")
        with pytest.raises(WaitTimeoutError, match="still RUNNING"):
            stop(store, "7", timeout_s=0.1)

    def test_a_silent_controller_cancels_nothing_and_says_so(self, store, slurm):
        submitted_job(store)
        slurm.be_silent()
        with pytest.raises(SchedulerUnavailableError, match="does not answer"):
            stop(store, "8b")


class TestLogs:
    """Whose logs a person means who names a service with several jobs."""

    def test_a_ready_one_then_one_that_runs_then_the_last_that_ended(self, store, slurm, stubs):
        record(store, "7", state="failed", reason="x")
        submitted_job(store, "8")
        slurm.queue(("8", "PENDING", "Priority"))
        assert diagnosis.find_job(store, "8b")[0].job_id == "7"
        assert diagnosis.find_job(store, "8b", to_follow=True)[0].job_id == "8"  # it has nothing to show yet
        slurm.queue(("8", "RUNNING", "None"))
        assert diagnosis.find_job(store, "8b")[0].job_id == "8"
        slurm.queue(("8", "RUNNING", "None"), ("9", "RUNNING", "None"))
        stubs.start(service="8b", model=MODEL, job_id="9")
        status, others = diagnosis.find_job(store, "8b")
        assert (status.job_id, {one.job_id for one in others}) == ("9", {"7", "8"})
        assert diagnosis.find_job(store, "7")[0].job_id == "7"
