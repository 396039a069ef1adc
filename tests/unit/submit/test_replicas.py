"""Several replicas of a service: one array, more of them, fewer of them; against stand-ins for Slurm's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError
from hpc_serve.submit.services import wait as waiting
from hpc_serve.submit.services.want import scale
from hpc_serve.submit.status.status_reader import find
from tests.support.stubs import make_record
from tests.unit.submit.service_8b import MODEL, states, submit


@pytest.fixture
def live(engines):
    """Two tasks of array 7 that serve."""
    for task in range(2):
        engines.start(job_id=f"7_{task}", model=MODEL)
    return engines


class TestSubmit:
    def test_replicas_are_tasks_of_one_array(self, store, slurm):
        done = submit(replicas=3)
        assert (done.job_id, [job.job_id for job in done.jobs]) == ("101", ["101_0", "101_1", "101_2"])
        (script,) = slurm.scripts
        assert "#SBATCH --array=0-2\n" in script
        assert f"#SBATCH --output={store.log_dir('8b')}/%A_%a.log\n" in script
        assert {job.log_path for job in done.jobs} == {str(store.log_dir("8b") / f"101_{n}.log") for n in range(3)}
        assert states(store) == {f"101_{task}": "pending" for task in range(3)}
        assert done.others == ()


def test_a_task_and_the_array_are_found(store, slurm):
    submit(replicas=3)
    assert [status.job_id for status in find(store, "101_1")] == ["101_1"]
    assert {status.job_id for status in find(store, "101")} == {"101_0", "101_1", "101_2"}
    with pytest.raises(ServiceNotFoundError):
        find(store, "10")


def test_status_counts_the_replicas(store, slurm, live, ran):
    slurm.queue(("7_0", "RUNNING", "None"), ("7_1", "RUNNING", "None"), ("8", "PENDING", "Priority"))
    store.write(make_record(service="other", job_id="9", state="starting"))
    slurm.name_in_queue("8", "hpc-serve-8b")
    out = ran(["status"]).out
    assert "8b: 2/3 replicas ready\n" in out
    assert "other:" not in out
    assert ran(["status", "8b"]).out.endswith("8b: 2/3 replicas ready\n")


class TestWait:
    def test_enough_of_them(self, store, slurm, live):
        slurm.queue(("7_0", "RUNNING", "None"), ("7_1", "RUNNING", "None"))
        assert waiting.wait(store, "8b", replicas=2).state == "ready"
        assert waiting.wait(store, "8b", job_id="7", replicas=2).state == "ready"
        assert waiting.wait(store, "8b", job_id="7_0").job_id == "7_0"
        with pytest.raises(InvalidRequestError, match=r"8b has 2 replicas, so 3 .*`hpc-serve scale 8b 3`"):
            waiting.wait(store, "8b", replicas=3)

    def test_one_that_failed_is_missing(self, store, slurm, live):
        end = {"failed_part": "engine", "reason": "no memory", "exit_code": 1}
        store.write(make_record(service="8b", job_id="7_2", state="failed", **end))
        slurm.queue(("7_0", "RUNNING", "None"), ("7_1", "RUNNING", "None"))
        assert waiting.wait(store, "8b", replicas=2).state == "ready"
        with pytest.raises(ServiceFailedError, match=r"job 7_2.*no memory"):
            waiting.wait(store, "8b", replicas=3)

    def test_one_that_starts_is_waited_for(self, store, slurm, live):
        """The third becomes ready while it is waited for."""
        store.write(make_record(service="8b", job_id="7_2", state="starting", stage="loading weights"))
        slurm.queue(*((f"7_{task}", "RUNNING", "None") for task in range(3)))
        seen = []

        def go_on(status):
            seen.append((status.job_id, status.state))
            if len(seen) == 1:
                live.start(job_id="7_2", model=MODEL)

        assert waiting.wait(store, "8b", replicas=3, on_change=go_on, timeout_s=60).state == "ready"
        assert seen[0] == ("7_2", "starting")


class TestScale:
    def test_more_are_submitted_with_the_script_of_the_last(self, store, slurm):
        first = submit(replicas=2)
        done = scale(store, "8b", 5)
        assert (done.before, [job.job_id for job in done.added]) == (2, ["102_0", "102_1", "102_2"])
        words = slurm.sbatch_words[-1].split()
        assert words[:-1] == ["--array=0-2", f"--output={store.log_dir('8b')}/%A_%a.log"]
        assert slurm.scripts[1] == slurm.scripts[0]
        assert len(states(store)) == 5
        assert done.added[0].predicted == first.job.predicted
        assert Path(done.added[0].script).read_text() == slurm.scripts[0]

    def test_those_that_serve_nobody_go_first_and_of_them_the_newest(self, store, slurm, live):
        store.write_submitted(submit(replicas=2).job)
        slurm.queue(("7_0", "RUNNING", "None"), ("7_1", "RUNNING", "None"), ("101_0", "PENDING", "Priority"))
        slurm.name_in_queue("101_1", "hpc-serve-8b")
        for task in ("101_0", "101_1"):
            slurm.job(task, "CANCELLED", after_cancel=True, nodes="")
        told = []
        done = scale(store, "8b", 3, on_stop=lambda status: told.append(status.job_id))
        assert (done.before, told, slurm.cancelled) == (4, ["101_1"], ["101_1"])
        assert [status.state for status in done.ended] == ["stopped"]
        assert scale(store, "8b", 2).ended[0].job_id == "101_0"
        assert states(store)["7_0"] == states(store)["7_1"] == "ready"

    def test_the_command_says_what_it_does(self, store, slurm, ran):
        submit()
        assert ran(["scale", "8b", "3"]).out == (
            "8b: submitted as job 102_0\n8b: submitted as job 102_1\n8b has 3 replicas, it had 1.\n"
        )
        assert ran(["scale", "8b", "3"]).out == "8b has 3 replicas, as before.\n"
        assert (len(slurm.scripts), slurm.cancelled) == (2, [])

    def test_none_is_a_stop(self, store, slurm, capsys):
        submit()
        assert run(["scale", "8b", "0"]) == 2
        with pytest.raises(InvalidRequestError, match="`hpc-serve stop 8b` ends it"):
            scale(store, "8b", 0)

    def test_what_was_started_by_hand_has_no_script(self, store, slurm, live):
        slurm.queue(("7_0", "RUNNING", "None"), ("7_1", "RUNNING", "None"))
        with pytest.raises(InvalidRequestError, match="no script of `hpc-serve submit` for 8b"):
            scale(store, "8b", 4)
        assert slurm.scripts == []
