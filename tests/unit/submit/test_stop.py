"""Waiting for replicas, stopping them, and whose logs are meant; against stand-ins for Slurm's commands."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import ServiceFailedError, ServiceNotFoundError, WaitTimeoutError
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.rendezvous.claims import claim
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, drain_file, read_drain_request
from hpc_serve.submit import diagnosis
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.services import wait
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.status.status_reader import find
from tests.cluster import wait_for
from tests.unit.submit.service_8b import MODEL, queued, record, submitted_job, the_one


class TestWait:
    def test_the_stages_are_shown_and_a_failure_ends_it_with_the_last_log_lines(self, store, slurm):
        queued(store, slurm, "PENDING", "Priority")
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

    def test_a_second_end_is_given_as_much_time_for_its_record_as_the_first(self, store, slurm, monkeypatch):
        monkeypatch.setattr(wait, "_RECORD_MAY_FOLLOW_S", 60.0)
        now, told = 1.0, list[str]()

        def sleep(_: float) -> None:
            time.sleep(0.02)
            if told == ["failed", "pending", "failed"]:  # its record is seen after Slurm's word
                record(store, state="failed", failed_part="engine", reason="the real reason")

        monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        submitted_job(store)
        slurm.job("7", "FAILED", exit_code="3:0")

        def go_on(status: ReplicaStatus) -> None:
            nonlocal now
            told.append(status.state)
            if told == ["failed"]:
                slurm.forget("7")
                slurm.queue(("7", "PENDING", "BeginTime"))
            elif told == ["failed", "pending"]:
                now += 3600.0
                slurm.job("7", "FAILED", exit_code="3:0")

        with pytest.raises(ServiceFailedError, match="the real reason"):
            wait.wait(store, "8b", timeout_s=7200, on_change=go_on)

    @pytest.mark.parametrize(
        ("reason", "partition", "words"),
        [
            ("Priority", "gpu", "its job goes on: pending: waiting behind"),
            ("PartitionNodeLimit", "gpu,small", r"one of its partitions \(gpu,small\) cannot run it"),
        ],
    )
    def test_not_ready_in_time_is_no_failure(self, store, slurm, reason, partition, words):
        queued(store, slurm, "PENDING", reason, partition=partition)
        with pytest.raises(WaitTimeoutError, match=words):
            wait.wait(store, "8b", timeout_s=0)

    def test_a_record_that_cannot_be_read_is_named(self, store, slurm):
        queued(store, slurm, "RUNNING")
        (store.service_dir("8b") / "7-r0-0.json").write_text("{")
        with pytest.raises(WaitTimeoutError, match=r"7-r0-0\.json is not JSON"):
            wait.wait(store, "8b", timeout_s=0)

    @pytest.mark.parametrize("reason", ["PartitionNodeLimit", "QOSMaxNodePerJobLimit", "DependencyNeverSatisfied"])
    def test_a_job_that_will_never_start_ends_the_wait(self, store, slurm, reason):
        queued(store, slurm, "PENDING", reason)
        with pytest.raises(ServiceFailedError, match=rf"never|not start by itself.*\({reason}\)") as failed:
            wait.wait(store, "8b", timeout_s=60)
        assert "Submit it with" in str(failed.value)
        assert str(failed.value).endswith("hpc-serve stop 7")

    def test_what_the_partitions_have_is_said_with_it(self, store, slurm):
        queued(store, slurm, "PENDING", "PartitionTimeLimit")
        with pytest.raises(ServiceFailedError, match=r"Time limits here: gpu 1-00:00:00\."):
            wait.wait(store, "8b", timeout_s=60)
        (slurm.bin / "sinfo").write_text("#!/bin/bash\nexit 1\n")
        with pytest.raises(ServiceFailedError, match="more time than its partition allows"):
            wait.wait(store, "8b", timeout_s=60)

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


@pytest.fixture
def replica(store, slurm, engines) -> EndpointRecord:
    """The record of a replica of job 7 that is ready."""
    queued(store, slurm, "RUNNING")
    slurm.job("7", "RUNNING")
    engines.start(service="8b", model=MODEL, job_id="7")
    return store.read("8b").records[0]


def asked_to_drain(store: ServiceStore) -> DrainRequest | None:
    return read_drain_request(drain_file(store, "8b", "7-r0-0.json"))


class TestStop:
    def test_a_replica_that_serves_is_asked_to_drain_and_ends_by_itself(self, store, slurm, replica):
        def finish() -> DrainRequest:
            request = wait_for(lambda: asked_to_drain(store), 60)
            store.write(dataclasses.replace(replica, state="stopped", reason="asked; 3 requests finished"))
            slurm.job("7", "COMPLETED")
            return request

        with ThreadPoolExecutor(1) as threads:
            finishing = threads.submit(finish)
            (status,) = stop(store, "8b", drain_s=60)
        request = finishing.result()
        assert (request.by.split(" on ")[0], request.deadline_s) == ("hpc-serve stop", 60)
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
        assert asked_to_drain(store).deadline_s == 0

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
        queued(store, slurm, "PENDING", "Priority")
        slurm.job("7", "CANCELLED", after_cancel=True, nodes="")
        if by == "scancel":
            scheduler.cancel("7")
        stop(store, "8b")
        assert slurm.cancelled == ["7"]
        slurm.forget("7")
        status = the_one(store)
        assert (status.state, status.reason) == ("stopped", "it was cancelled before it began (CANCELLED)")
        assert store.read("8b").awaiting_record() == ()
        claim(store, "8b", "another-model")  # its name is free

    def test_what_a_job_without_a_record_left_is_known_after_slurm_has_forgotten_it(self, store, slurm):
        job = submitted_job(store, log_path=str(store.log_dir("8b") / "7.log"))
        Path(job.log_path).write_text("no Python environment in /x\n")
        slurm.job("7", "FAILED", exit_code="78:0")
        stop(store, "8b")
        slurm.forget("7")
        status = the_one(store)
        assert (status.state, status.exit_code) == ("failed", 78)
        assert status.reason == f"its script exited with code 78: {exit_code_words(78)} (FAILED)"
        assert status.last_log_lines == ("no Python environment in /x",)

    def test_a_job_that_does_not_end_is_told(self, store, slurm):
        submitted_job(store)
        slurm.job("7", "RUNNING")
        with pytest.raises(WaitTimeoutError, match="still RUNNING"):
            stop(store, "7", timeout_s=0.1)


class TestLogs:
    """Whose logs a person means who names a service with several jobs."""

    def test_a_ready_one_then_one_that_runs_then_the_last_that_ended(self, store, slurm, engines):
        record(store, "7", state="failed", reason="x")
        submitted_job(store, "8")
        slurm.queue(("8", "PENDING", "Priority"))
        assert diagnosis.find_job(store, "8b")[0].job_id == "7"
        assert diagnosis.find_job(store, "8b", to_follow=True)[0].job_id == "8"  # it has nothing to show yet
        slurm.queue(("8", "RUNNING", "None"))
        assert diagnosis.find_job(store, "8b")[0].job_id == "8"
        slurm.queue(("8", "RUNNING", "None"), ("9", "RUNNING", "None"))
        engines.start(service="8b", model=MODEL, job_id="9")
        status, others = diagnosis.find_job(store, "8b")
        assert (status.job_id, {one.job_id for one in others}) == ("9", {"7", "8"})
        assert diagnosis.find_job(store, "7")[0].job_id == "7"
