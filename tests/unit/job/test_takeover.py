"""A job of a chain that is ready asks those before it to drain."""

from __future__ import annotations

import asyncio
import time

import pytest

from hpc_serve.job.run import record_keeper
from hpc_serve.job.run.record_keeper import RecordKeeper, drain_predecessors, take_over
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, ask_to_drain, drain_file, read_drain_request
from tests.support.stubs import make_record, make_submitted
from tests.unit.job.conftest import in_a_loop

NOW = 1_790_000_000.0
LIMIT_S = 3600.0


@pytest.fixture
def store(tmp_path) -> ServiceStore:
    """A chain of three jobs, 1, 2 and 3."""
    store = ServiceStore(tmp_path / "home")
    for job_id, before in (("1", ""), ("2", "1"), ("3", "2")):
        store.write_submitted(make_submitted(service="8b", job_id=job_id, predecessor=before, time_limit_s=LIMIT_S))
    return store


def record(job_id: str, **fields) -> EndpointRecord:
    return make_record(**{"service": "8b", "job_id": job_id, "started_at": NOW, **fields})


def asked(store: ServiceStore, job_id: str, *, restart: int = 0, replica: int = 0) -> DrainRequest | None:
    return read_drain_request(drain_file(store, "8b", f"{job_id}-r{restart}-{replica}.json"))


def now() -> float:
    """Ten minutes before the time limit of a job that began at NOW."""
    return NOW + LIMIT_S - 600


def test_the_one_before_drains_until_its_time_limit(store):
    store.write(record("1"))
    assert drain_predecessors(store, record("2"), now=now)
    assert asked(store, "1") == DrainRequest(
        by="hpc-serve chain: job 2 has taken over", cause="handover", deadline_s=580.0, requested_at=now()
    )
    assert asked(store, "2") is None


def test_all_that_come_before_drain(store):
    """The second failed, so the first serves still."""
    store.write(record("1"))
    store.write(record("2", state="failed"))
    drain_predecessors(store, record("3"), now=now)
    assert (asked(store, "1") is not None, asked(store, "2")) == (True, None)


def test_one_that_was_run_again_drains_in_its_last_run(store):
    store.write(record("1", state="stopped"))
    store.write(record("1", restart=1, state="starting"))
    drain_predecessors(store, record("2"), now=now)
    assert asked(store, "1") is None
    assert asked(store, "1", restart=1) is not None


def test_each_replica_of_a_job_hands_over_for_itself(store):
    for replica in range(2):
        store.write(record("1", replica=replica, replicas_per_job=2))
    drain_predecessors(store, record("2", replica=1, replicas_per_job=2), now=now)
    assert (asked(store, "1"), asked(store, "1", replica=1) is not None) == (None, True)


def test_who_was_asked_is_not_asked_again(store):
    store.write(record("1"))
    theirs = DrainRequest(by="hpc-serve stop", deadline_s=5.0, requested_at=NOW)
    ask_to_drain(drain_file(store, "8b", "1-r0-0.json"), theirs)
    assert drain_predecessors(store, record("2"), now=now)
    assert asked(store, "1") == theirs


def test_those_that_come_after_are_left_alone(store):
    store.write(record("2"))
    assert not drain_predecessors(store, record("1"), now=now)
    assert asked(store, "2") is None


@in_a_loop
async def test_only_one_that_is_ready_takes_over(store, monkeypatch):
    monkeypatch.setattr(record_keeper, "_POLL_S", 0.01)
    store.write(record("1"))

    keeper = RecordKeeper(store, record("2", state="starting"))
    task = asyncio.create_task(take_over(store, keeper))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert asked(store, "1") is None
    keeper.update(state="ready")
    deadline = time.monotonic() + 60
    while asked(store, "1") is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not task.done()  # it looks again: Slurm may run the one before once more
    task.cancel()


@in_a_loop
async def test_one_of_no_chain_looks_once(store):
    await asyncio.wait_for(take_over(store, RecordKeeper(store, record("1"))), 60)
