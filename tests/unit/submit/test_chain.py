"""Jobs submitted ahead (`submit --chain`): what sbatch is told, what is shown, and who is stopped with whom."""

from __future__ import annotations

import json
from functools import partial

import pytest

from hpc_serve.cli.main import run
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError, SubmissionRefusedError, WaitTimeoutError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.services import carry_out
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.services.want import scale
from hpc_serve.submit.status.status_reader import find, read_status
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import StubService
from tests.unit.submit import service_8b
from tests.unit.submit.service_8b import MODEL, states

submit = partial(service_8b.submit, chain=3)


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
    submit()
    slurm.queue(("101", "RUNNING", "None"), ("102", "PENDING", "Dependency"), ("103", "PENDING", "Dependency"))


@pytest.fixture
def first_serves(engines: StubService, slurm: FakeSlurm, cancelled: None, first_runs: None) -> None:
    """The first serves."""
    slurm.job("101", "RUNNING")
    engines.start(job_id="101", model=MODEL)


class TestSubmit:
    def test_each_begins_before_the_end_of_the_one_before(self, store, slurm):
        done = submit(slurm=SlurmOptions(time="12:00:00"))
        assert [(job.job_id, job.predecessor) for job in done.jobs] == [("101", ""), ("102", "101"), ("103", "102")]
        assert dependencies(slurm) == ["", "--dependency=after:101+690", "--dependency=after:102+690"]
        assert {job.time_limit_s for job in store.read_submitted("8b")} == {43200.0}
        assert (done.job_id, done.num_replicas) == ("101", 1)
        assert len(set(slurm.scripts)) == 1

    def test_each_of_several_replicas_has_its_own(self, store, slurm):
        done = submit(replicas=2)
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
            submit()
        assert sorted(slurm.cancelled) == ["101", "102"]

    def test_one_that_is_added_later_is_no_part_of_it(self, store, slurm):
        submit()
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


class TestStatus:
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
        submit()
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


class TestStop:
    def test_the_whole_chain_ends_with_the_service(self, store, slurm, first_serves):
        ended = stopping.stop(store, find(store, "8b"), drain_s=0)
        assert {status.job_id: status.state for status in ended} == dict.fromkeys(("101", "102", "103"), "stopped")
        assert slurm.cancelled == ["102", "103", "101"]  # first those that wait: none shall begin meanwhile

    def test_what_comes_after_a_job_ends_with_it(self, store, slurm, first_serves):
        stopping.stop(store, find(store, "102"))
        assert sorted(slurm.cancelled) == ["102", "103"]
        assert states(store)["101"] == "ready"

    def test_another_chain_of_the_service_is_left_alone(self, store, slurm, cancelled):
        submit(replicas=2)
        stopping.stop(store, find(store, "101"))
        assert sorted(slurm.cancelled) == ["101", "102", "103"]


class TestScale:
    def test_those_that_only_take_over_do_not_count(self, store, slurm, first_serves):
        done = scale(store, "8b", 2)
        assert (done.before, [job.job_id for job in done.added]) == (1, ["104_0"])

    def test_a_replica_that_is_spared_takes_its_chain_with_it(self, store, slurm, cancelled):
        submit(replicas=2)
        done = scale(store, "8b", 1)
        assert done.before == 2
        assert sorted(slurm.cancelled) == ["104", "105", "106"]
