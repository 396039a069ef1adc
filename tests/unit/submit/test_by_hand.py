"""Jobs that a person gave to sbatch: known by their names in the queue, and by where their output goes."""

from __future__ import annotations

from hpc_serve.exit_codes import exit_code_words
from hpc_serve.submit.logs import files_of
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.status.status_reader import find, read_status
from tests.unit.submit.service_8b import submitted_job, the_one


def test_a_job_submitted_by_hand_is_known_by_its_name(store, slurm):
    slurm.name_in_queue("9", "hpc-serve-70b")
    slurm.name_in_queue("10", "something-else")
    slurm.name_in_queue("11", "hpc-serve-not a name")
    status = the_one(store)
    assert (status.service, status.job_id, status.state) == ("70b", "9", "pending")
    assert read_status(store, "8b").everywhere == ()


def test_a_job_submitted_by_hand_that_failed_before_it_could_say_so_is_known(store, slurm, tmp_path):
    log = tmp_path / "hpc-serve-70b-9.log"
    log.write_text("no Python environment\n")
    slurm.job("9", "FAILED", exit_code="78:0", name="hpc-serve-70b", log=str(log))
    slurm.job("10", "FAILED", exit_code="1:0", name="something-else")
    status = the_one(store)
    assert (status.service, status.job_id, status.state, status.exit_code) == ("70b", "9", "failed", 78)
    assert status.reason == f"its script exited with code 78: {exit_code_words(78)} (FAILED)"
    assert (files_of(status), status.last_log_lines) == ([log], ("no Python environment",))
    assert status.updated_at is not None


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
