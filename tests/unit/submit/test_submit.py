"""What `submit` checks, hands to sbatch and writes down; against stand-ins for Slurm's commands."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import pytest

from hpc_serve.errors import (
    DoesNotFitError,
    InvalidRequestError,
    SchedulerUnavailableError,
    ServiceConflictError,
    StoreError,
    SubmissionRefusedError,
    UnknownModelError,
)
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planned_speed import planned_tokens_per_s
from hpc_serve.submit.request.options import Environment, SlurmOptions
from hpc_serve.submit.services import carry_out
from hpc_serve.submit.status.status_reader import read_status
from tests.unit.submit.service_8b import MODEL, submit


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class TestSubmit:
    def test_a_job_is_submitted_and_written_down(self, store, slurm):
        done = submit(slurm=SlurmOptions(partition="gpu"))
        assert (done.job.job_id, done.job.model, done.job.gpus_per_node) == ("101", MODEL, 1)
        assert store.read_submitted("8b") == (done.job,)
        (script,) = slurm.scripts
        assert script == Path(done.job.script).read_text()
        assert stat.S_IMODE(Path(done.job.script).parent.stat().st_mode) == 0o700
        assert "#SBATCH --partition=gpu\n" in script
        assert f"#SBATCH --output={store.log_dir('8b')}/%j.log\n" in script
        assert done.job.log_path == str(store.log_dir("8b") / "101.log")
        assert store.read_api_key("8b") not in script
        assert done.job.predicted["weight_bytes"] > 16e9
        assert planned_tokens_per_s(done.job.predicted, 1) > 0

    def test_the_log_folder_asked_for_is_made(self, store, slurm, tmp_path):
        done = submit(log_dir=str(tmp_path / "a" / "logs"))
        assert done.job.log_path == str(tmp_path / "a" / "logs" / "101.log")
        assert (tmp_path / "a" / "logs").is_dir()

    def test_what_the_service_has_already_is_told(self, store, slurm):
        first = submit()
        assert first.others == ()
        slurm.name_in_queue("55", "hpc-serve-8b")  # submitted by hand
        second = submit()
        assert sorted((one.job_id, one.state) for one in second.others) == [("101", "pending"), ("55", "pending")]
        slurm.queue()
        slurm.job("101", "CANCELLED")
        slurm.job("102", "FAILED", exit_code="1:0")
        third = submit()
        assert third.others == ()

    def test_a_refused_job_leaves_no_claim_and_no_note(self, store, slurm):
        slurm.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
        with pytest.raises(SubmissionRefusedError, match="Invalid qos specification"):
            submit()
        assert files(store.service_dir("8b")) == {"api_key"}
        (slurm.bin.parent / "refusal").unlink()
        submit(model="70b")  # the name is free for another model

    @pytest.mark.parametrize(
        ("reason", "words"),
        [
            ("PartitionConfig", ["--nodes=1 --time=12:00:00", "gpu 1-00:00:00", "gpu: 3 nodes with gpu:h100:8"]),
            ("PartitionNodeLimit", ["more nodes than its partition allows (PartitionNodeLimit)", "gpu: 3 nodes"]),
            ("PartitionTimeLimit", ["more time than its partition allows", "Time limits here: gpu 1-00:00:00"]),
            ("QOSMaxWallDurationPerJobLimit", ["QOS does not allow one job so much", "--time"]),
        ],
    )
    def test_a_job_that_slurm_says_will_never_start_is_refused(self, store, slurm, reason, words):
        slurm.job("101", "PENDING", reason=reason)
        with pytest.raises(SubmissionRefusedError, match="never start the job, so it was cancelled") as refused:
            submit()
        assert all(word in str(refused.value) for word in words)
        assert slurm.cancelled == ["101"]
        assert files(store.service_dir("8b")) == {"api_key", "101.forgotten"}
        slurm.job("101", "CANCELLED", name="hpc-serve-8b", nodes="", log=str(store.log_dir("8b") / "101.log"))
        assert read_status(store).everywhere == ()
        submit(model="70b")  # the name is free for another model
        slurm.job("103", "PENDING", reason=reason)
        with pytest.raises(SubmissionRefusedError):
            carry_out.add_jobs(store, "8b", 1)
        assert [job.job_id for job in store.read_submitted("8b")] == ["102"]

    @pytest.mark.parametrize(
        ("reason", "partition"),
        [
            *((reason, "gpu") for reason in ("Resources", "PartitionDown", "AssocGrpCPUMinutesLimit", "JobHeldUser")),
            ("PartitionNodeLimit", "gpu,small"),
            ("PartitionConfig", "small,gpu"),
        ],
    )
    def test_one_that_may_start_after_all_is_left_in_the_queue(self, store, slurm, reason, partition):
        slurm.job("101", "PENDING", reason=reason, partition=partition)
        assert submit().job_id == "101"
        assert slurm.cancelled == []

    def test_a_controller_that_falls_silent_after_sbatch_refuses_nothing(self, store, slurm):
        (slurm.bin / "scontrol").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        assert submit().job_id == "101"

    def test_what_cannot_be_written_down_is_not_left_running(self, store, slurm, monkeypatch):
        def full(*_):
            raise StoreError("the filesystem is full")

        monkeypatch.setattr(ServiceStore, "write_submitted", full)
        with pytest.raises(StoreError, match="full"):
            submit()
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
    def test_what_cannot_work_is_refused_before_anything_happens(self, store, slurm, fields, error, words):
        with pytest.raises(error, match=words):
            submit(**fields)
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
            ({"config.json": "{}", "hpc-serve-args.txt": "--worker-cls a.B\n"}, (), r"args\.txt holds --worker-cls"),
        ],
    )
    def test_the_folder_of_a_stand_in_is_looked_at_before_the_queue(
        self, store, slurm, monkeypatch, tmp_path, files, engine_args, words
    ):
        """Random weights need no files: as an option, or in the folder's file of options."""
        if files is not None:
            (tmp_path / "model").mkdir()
        for name, text in (files or {}).items():
            (tmp_path / "model" / name).write_text(text)
        monkeypatch.setenv("HPC_SERVE_MODEL", str(tmp_path / "model"))
        with pytest.raises(InvalidRequestError, match=words) if words else contextlib.nullcontext():
            submit(engine_args=engine_args)
        assert len(slurm.scripts) == (not words)

    def test_without_an_environment_nothing_is_queued(self, store, slurm, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HPC_SERVE_ENV")
        with pytest.raises(InvalidRequestError, match="set HPC_SERVE_ENV"):
            submit()
        assert slurm.scripts == []

    def test_a_name_is_one_model_s_as_long_as_its_job_may_live(self, store, slurm):
        submit()
        with pytest.raises(ServiceConflictError, match="job 101"):
            submit(model="70b")
        assert len(slurm.scripts) == 1
        submit()  # the same model: another replica
        slurm.queue()
        for job_id in ("101", "102"):
            slurm.job(job_id, "CANCELLED")
        submit(model="70b")
        assert len(slurm.scripts) == 3

    def test_a_silent_controller_frees_no_name(self, store, slurm):
        submit()
        slurm.be_silent()
        with pytest.raises(ServiceConflictError):
            submit(model="70b")
        with pytest.raises(SchedulerUnavailableError):
            submit()
