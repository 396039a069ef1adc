"""Whether a job whose run has failed shall have another one (--requeue)."""

from __future__ import annotations

import pytest

from hpc_serve.job.rerun import main, why_no_rerun
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record, make_submitted

READY = {"measured": {"start_s": 40.0}}
DIED = {"state": "failed", "failed_part": "engine", "reason": "engine exited with 137", **READY}


def record(**fields) -> EndpointRecord:
    return make_record(**{"service": "8b", "job_id": "7", **fields})


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([DIED], ""),
        ([{"state": "ready", **READY}], ""),  # its launcher was killed
        ([{"state": "unresponsive", **READY}], ""),
        ([{"state": "starting", **READY}], ""),  # its engine was being started again
        ([{"state": "stopped", **READY}, DIED], ""),  # two replicas of a job
        ([], "no engine of it was ready in this run"),
        ([{"state": "failed", "reason": "engine exited with 1"}], "no engine of it was ready in this run"),
        ([{"state": "stopped", **READY}], "it was asked to end"),
        ([{"state": "draining", **READY}], "it was asked to end"),
        ([{**DIED, "drain_cause": "stop"}], "it was asked to end"),
    ],
)
def test_a_replica_that_was_ready_and_was_not_asked_to_end_is_worth_another_run(runs, why):
    said = why_no_rerun([record(replica=number, **fields) for number, fields in enumerate(runs)], restart=0, most=5)
    assert said.startswith(why)
    assert bool(said) == bool(why)


@pytest.mark.parametrize(("restart", "again"), [(0, True), (4, True), (5, False), (6, False)])
def test_the_number_of_runs_is_bounded(restart, again):
    said = why_no_rerun([record(restart=restart, **DIED)], restart=restart, most=5)
    assert said == (
        "" if again else f"it has been run again {restart} times already, for whatever reason, and 5 are the most"
    )


def test_a_job_with_a_successor_needs_no_other_run():
    assert why_no_rerun([record(**DIED)], restart=0, most=5, successor="9") == "job 9 takes over from it"


class TestProgram:
    @pytest.fixture
    def home(self, tmp_path, monkeypatch) -> ServiceStore:
        job = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "8", "SLURMD_NODENAME": "n1"}
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
        store = ServiceStore(tmp_path / "home")
        store.ensure_service("8b")
        return store

    def test_it_prints_the_job_and_says_why(self, home, capfd):
        """Of a task of an array SLURM_JOB_ID may be the id of the whole array."""
        home.write(record(job_id="7_1", **DIED))
        assert main(["--service", "8b", "--most", "5"]) == 0
        out, said = capfd.readouterr()
        assert out == "7_1\n"
        assert "asking Slurm to run job 7_1 again (1 of 5): engine exited with 137" in said

    def test_what_another_run_of_the_job_says_does_not_count(self, home, capfd, monkeypatch):
        home.write(record(job_id="7_1", **DIED))
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        home.write(record(job_id="7_1", restart=1, state="failed", reason="engine exited with 1"))
        assert main(["--service", "8b", "--most", "5"]) == 1
        out, said = capfd.readouterr()
        assert out == ""
        assert "Slurm is not asked to run job 7_1 again: no engine of it was ready" in said

    def test_a_successor_takes_over(self, home, capfd):
        home.write(record(job_id="7_1", **DIED))
        home.write_submitted(make_submitted(service="8b", job_id="7_1"))
        home.write_submitted(make_submitted(service="8b", job_id="9", predecessor="7_1"))
        assert main(["--service", "8b", "--most", "5"]) == 1
        assert "job 9 takes over from it" in capfd.readouterr().err

    def test_a_home_that_cannot_be_read_is_no_reason_to_run_again(self, home, capfd):
        folder = home.service_dir("8b")
        folder.chmod(0o777)
        assert main(["--service", "8b", "--most", "5"]) == 1
        assert capfd.readouterr().out == ""
