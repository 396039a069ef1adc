"""Several replicas of a service, and jobs submitted ahead (`--chain`); against stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpc_serve.cli.main import run
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import (
    InvalidRequestError,
    ServiceFailedError,
    ServiceNotFoundError,
    SubmissionRefusedError,
    WaitTimeoutError,
)
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import SUBMITTING_S
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.services import carry_out
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.services import wait as waiting
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.services.want import scale
from hpc_serve.submit.slurm import executor
from hpc_serve.submit.status.status_reader import find, read_status
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import StubService, make_record
from tests.unit.submit import service_8b
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

    def test_what_sbatch_refuses_or_ctrl_c_ends_is_not_wanted(self, store, slurm, monkeypatch):
        submit()
        before = read_wanted(store, "8b")
        slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
        with pytest.raises(SubmissionRefusedError):
            scale(store, "8b", 2)
        assert (wanted := read_wanted(store, "8b")).count == before.count == 1
        assert (wanted.failures, wanted.problem) == (0, "")
        monkeypatch.setattr(executor, "submit_to_slurm", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scale(store, "8b", 2)
        assert ((wanted := read_wanted(store, "8b")).count, wanted.submitting) == (1, 0)

    def test_it_says_that_it_waits_for_another_command(self, store, slurm, caplog):
        submit()
        began_at = time.time() - SUBMITTING_S + 0.5
        change_wanted(store, "8b", lambda found: replace(found, submitting=1, submitting_at=began_at))
        assert len(scale(store, "8b", 2).added) == 1
        assert "8b: waiting for another command that submits it, 0 s at most" in caplog.text

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


submit_chain = partial(service_8b.submit, chain=3)


def dependencies(slurm: FakeSlurm) -> list[str]:
    """The dependency of each job, "" for none."""
    words = [line.split() for line in slurm.sbatch_words]
    return [next((word for word in line if word.startswith("--dependency")), "") for line in words]


@pytest.fixture
def cancelled(slurm: FakeSlurm) -> None:
    """What scancel of each job brings about."""
    for job_id in range(101, 111):
        slurm.job(str(job_id), "CANCELLED", after_cancel=True, nodes="")


@pytest.fixture
def first_runs(store: ServiceStore, slurm: FakeSlurm) -> None:
    """A chain of three, 101 to 103, of which the first runs."""
    submit_chain()
    slurm.queue(("101", "RUNNING", "None"), ("102", "PENDING", "Dependency"), ("103", "PENDING", "Dependency"))


@pytest.fixture
def first_serves(engines: StubService, slurm: FakeSlurm, cancelled: None, first_runs: None) -> None:
    """The first serves."""
    slurm.job("101", "RUNNING")
    engines.start(job_id="101", model=MODEL)


class TestChain:
    def test_each_begins_before_the_end_of_the_one_before(self, store, slurm):
        done = submit_chain(slurm=SlurmOptions(time="12:00:00"))
        assert [(job.job_id, job.predecessor) for job in done.jobs] == [("101", ""), ("102", "101"), ("103", "102")]
        assert dependencies(slurm) == ["", "--dependency=after:101+690", "--dependency=after:102+690"]
        assert {job.time_limit_s for job in store.read_submitted("8b")} == {43200.0}
        assert (done.job_id, done.num_replicas) == ("101", 1)
        assert len(set(slurm.scripts)) == 1

    def test_each_of_several_replicas_has_its_own(self, store, slurm):
        done = submit_chain(replicas=2)
        assert [job.predecessor for job in done.jobs] == ["", "101", "102", "", "104", "105"]
        assert done.num_replicas == 2
        assert "--array" not in slurm.scripts[0]

    def test_a_refusal_half_way_leaves_nothing(self, store, slurm, monkeypatch):
        really, tries = carry_out.submit_to_slurm, iter((False, False, True))

        def refuse_the_third(*args, **fields):
            if next(tries):
                raise SubmissionRefusedError("sbatch refused the job: a limit")
            return really(*args, **fields)

        monkeypatch.setattr(carry_out, "submit_to_slurm", refuse_the_third)
        with pytest.raises(SubmissionRefusedError, match="a limit"):
            submit_chain()
        assert sorted(slurm.cancelled) == ["101", "102"]

    def test_one_that_is_added_later_is_no_part_of_it(self, store, slurm):
        submit_chain()
        (added,) = carry_out.add_jobs(store, "8b", 1)
        assert (added.job_id, added.predecessor, added.time_limit_s) == ("104_0", "", 0.0)
        assert dependencies(slurm)[-1] == ""

    def test_as_a_person_sees_it(self, store, slurm, ran):
        out = ran(["submit", "8b", "--chain", "3", "--time", "60", "--overlap", "15m"]).out
        assert "8b: submitted as job 101 (1 node x 1 GPU" in out
        assert "ahead   2 jobs take over in time: 102, 103\n" in out
        assert dependencies(slurm)[1] == "--dependency=after:101+45"
        told = json.loads(ran(["submit", "8b", "--chain", "2", "--json"]).out)
        assert [one["job_id"] for one in told["replicas"]] == ["104"]
        assert told["ahead"] == [{"job_id": "105", "predecessor": "104", "log": str(store.log_dir("8b") / "105.log")}]


class TestSiteWhereJobsMayNotSubmit:
    def test_keep_up_names_the_chain(self, tmp_path, ran):
        site = tmp_path / "site.yaml"
        site.write_text("jobs_can_submit: no\n")
        said = ran(["render", "8b", "--keep-up", "--site", str(site)], 2).err
        assert "(jobs_can_submit: false). Submit jobs ahead in its place: --chain 7 is seven jobs" in said
        assert "hpc-serve scale" in ran(["render", "8b", "--idle-stop", "30m", "--site", str(site)], 2).err
        assert run(["render", "8b", "--site", str(site)]) == 0


class TestChainShown:
    def test_it_says_what_is_still_to_come(self, store, slurm, first_serves, ran):
        by_job = {status.job_id: status for status in read_status(store, "8b").replicas}
        assert {job: status.successor for job, status in by_job.items()} == {
            "101": "102 pending, then 103",
            "102": "103 pending",
            "103": "",
        }
        out = ran(["status"]).out
        assert "successor 102 pending, then 103" in out
        assert "replicas ready" not in out  # it is one service of one replica

    def test_one_that_is_over_has_none(self, store, slurm):
        submit_chain()
        slurm.queue(("102", "PENDING", "Dependency"), ("103", "PENDING", "Dependency"))
        slurm.job("101", "FAILED", exit_code="1:0")
        successors = {status.job_id: status.successor for status in read_status(store, "8b").replicas}
        assert successors == {"101": "", "102": "103 pending", "103": ""}

    def test_those_that_are_over_do_not_come(self, store, slurm, first_serves):
        slurm.queue(("101", "RUNNING", "None"), ("103", "PENDING", "Dependency"))
        slurm.job("102", "CANCELLED", nodes="")
        (first,) = (status for status in read_status(store, "8b").replicas if status.job_id == "101")
        assert (first.successor, first.successor_job_id) == ("103 pending", "103")


def test_who_waits_for_the_service_waits_for_the_first(store, first_runs):
    seen: list[ReplicaStatus] = []
    with pytest.raises(WaitTimeoutError):
        wait(store, "8b", timeout_s=0.0, on_change=seen.append)
    assert [status.job_id for status in seen] == ["101"]
    with pytest.raises(InvalidRequestError, match="8b has 1 replicas, so 2 will not be ready"):
        wait(store, "8b", replicas=2, timeout_s=0.0)


class TestChainStopped:
    def test_the_whole_chain_ends_with_the_service(self, store, slurm, first_serves):
        ended = stopping.stop(store, find(store, "8b"), drain_s=0)
        assert {status.job_id: status.state for status in ended} == dict.fromkeys(("101", "102", "103"), "stopped")
        assert slurm.cancelled == ["102", "103", "101"]  # first those that wait: none shall begin meanwhile

    def test_what_comes_after_a_job_ends_with_it(self, store, slurm, first_serves):
        stopping.stop(store, find(store, "102"))
        assert sorted(slurm.cancelled) == ["102", "103"]
        assert states(store)["101"] == "ready"

    def test_another_chain_of_the_service_is_left_alone(self, store, slurm, cancelled):
        submit_chain(replicas=2)
        stopping.stop(store, find(store, "101"))
        assert sorted(slurm.cancelled) == ["101", "102", "103"]


class TestChainScaled:
    def test_those_that_only_take_over_do_not_count(self, store, slurm, first_serves):
        done = scale(store, "8b", 2)
        assert (done.before, [job.job_id for job in done.added]) == (1, ["104_0"])

    def test_a_replica_that_is_spared_takes_its_chain_with_it(self, store, slurm, cancelled):
        submit_chain(replicas=2)
        done = scale(store, "8b", 1)
        assert done.before == 2
        assert sorted(slurm.cancelled) == ["104", "105", "106"]
