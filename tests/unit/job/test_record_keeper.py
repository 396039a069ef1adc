"""The record while its replica lives: one writer, though renewals are written from a thread."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path

import pytest

from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.run import record_keeper
from hpc_serve.job.run.record_keeper import RecordKeeper, drain_predecessors, publish_failure, take_over
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.start_times import last_start
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, ask_to_drain, drain_file, read_drain_request
from tests.cluster import wait_for
from tests.support.nodes import ALLOCATION
from tests.support.stubs import make_record, make_submitted


class SlowStore(ServiceStore):
    """A shared filesystem that takes its time over renewals."""

    def __init__(self, home) -> None:
        super().__init__(home)
        self.is_slow = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    def write(self, record, **options):
        if self.is_slow and record.state == "starting":
            self.entered.set()
            self.go_on.wait(60)
        return super().write(record, **options)


class FullStore(ServiceStore):
    """A filesystem that is full for the next `times` writes of a record."""

    times = math.inf

    def write(self, record, **options):
        if self.times > 0:
            self.times -= 1
            raise OSError(28, "No space left on device")
        return super().write(record, **options)


async def test_a_renewal_that_is_slow_to_be_written_does_not_undo_the_end(tmp_path):
    store = SlowStore(tmp_path)

    keeper = RecordKeeper(store, make_record(state="starting", stage="loading weights"))
    store.is_slow = True
    keeper.update(stage="compiling")
    renewals = asyncio.create_task(keeper.renew())
    await asyncio.to_thread(store.entered.wait, 60)
    threading.Timer(0.05, store.go_on.set).start()
    keeper.update(state="failed", reason="out of memory")
    store.go_on.wait(60)
    renewals.cancel()
    (record,) = store.read("405b").records
    assert (record.state, record.reason, record.counter) == ("failed", "out of memory", 3)


def test_a_disk_that_is_full_ends_nothing(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="hpc_serve"):
        RecordKeeper(FullStore(tmp_path), make_record()).update(state="draining")
    assert caplog.text.count("No space left on device") == 1


def test_a_record_says_since_when_it_is_in_its_state(tmp_path):
    keeper = RecordKeeper(ServiceStore(tmp_path), make_record(state_since=5.0))
    keeper.update(stage="ready", reason="none")
    assert keeper.record.state_since == 5.0
    keeper.update(state="unresponsive")
    assert keeper.record.state_since > 5.0
    (record,) = ServiceStore(tmp_path).read("405b").records
    assert record.state == "unresponsive"
    assert record.updated_at >= record.state_since > 5.0


async def test_the_last_record_is_tried_again_when_the_disk_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(record_keeper, "_WRITE_INTERVAL_S", 0.01)
    store = FullStore(tmp_path)
    store.times = 0
    keeper = RecordKeeper(store, make_record())
    store.times = 3
    keeper.update(state="stopped", reason="the time limit")
    assert ServiceStore(tmp_path).read("405b").records[0].state == "ready"
    await keeper.finish()
    counter = ServiceStore(tmp_path).read("405b").records[0].counter
    await keeper.finish()
    assert ServiceStore(tmp_path).read("405b").records[0].counter == counter
    (record,) = ServiceStore(tmp_path).read("405b").records
    assert (record.state, record.reason) == ("stopped", "the time limit")


async def test_a_disk_that_stays_full_does_not_keep_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(record_keeper, "_WRITE_INTERVAL_S", 0.01)
    keeper = RecordKeeper(FullStore(tmp_path), make_record())
    await asyncio.wait_for(keeper.finish(within_s=0.1), 60)


def begin(home: Path, **fields) -> RecordKeeper:
    return RecordKeeper(ServiceStore(home), make_record(state="starting", stage="starting", **fields))


async def test_a_record_says_how_far_the_start_is(tmp_path):
    store = ServiceStore(tmp_path)

    keeper = begin(tmp_path)
    keeper.set_phrase("starting the engine")
    keeper.set_phrase("loading weights", 1, 4)
    renewals = asyncio.create_task(keeper.renew())
    await asyncio.to_thread(wait_for, lambda: store.read("405b").records[0].progress, 60, what="a renewal")
    renewals.cancel()
    (record,) = store.read("405b").records
    assert (record.stage_words, record.start.stage) == ("loading weights 1/4", "weights")
    assert [*record.start.took_s] == ["nodes", "engine"]
    assert record.start.time_left_s is None
    assert record.start.since == pytest.approx(record.updated_at, abs=600)


def test_what_a_start_took_is_known_to_the_next_one(tmp_path):
    first = begin(tmp_path)
    first.set_phrase("loading weights", 4, 4)
    assert first.record.start.time_left_s is None
    first.update(state="ready", stage="ready")
    assert first.record.start.stage == ""
    second = begin(tmp_path, job_id="124")
    assert second.record.start.time_left_s is not None
    second.update(state="failed", reason="out of memory")
    assert second.record.start.time_left_s is None
    assert second.record.start.stage == "nodes"


def test_only_the_first_start_of_a_run_is_remembered_and_an_engine_that_is_started_again_has_stages_anew(tmp_path):
    keeper = begin(tmp_path)
    keeper.set_phrase("server is up")
    keeper.update(state="ready", stage="ready")
    past = last_start(tmp_path, keeper.record)
    keeper.start_again(state="starting", stage="starting the engine again (1 of 3)", engine_restarts=1)
    assert keeper.record.start.stage == "engine"
    keeper.phrase_prefix = "starting the engine again (1 of 3): "
    keeper.set_phrase("loading weights", 1, 4)
    assert keeper.record.stage == "starting the engine again (1 of 3): loading weights"
    keeper.update(state="ready", stage="ready")
    assert last_start(tmp_path, keeper.record) == past


def test_a_stage_that_is_over_is_not_shown_again(tmp_path):
    keeper = begin(tmp_path)
    keeper.set_phrase("capturing CUDA graphs", 1, 35)
    keeper.set_phrase("loading weights", 3, 4)
    assert keeper.record.stage_words == "capturing CUDA graphs 1/35"


def test_a_full_disk_loses_the_times_of_a_start_and_nothing_else(tmp_path, monkeypatch, caplog):
    def refuse(home, start):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_keeper, "remember_start", refuse)

    with caplog.at_level("WARNING", logger="hpc_serve"):
        keeper = begin(tmp_path)
        keeper.update(state="ready", stage="ready")
        assert keeper.record.state == "ready"
    assert "cannot write down how long this start took" in caplog.text


def test_the_plans_weights_stand_in_for_files_that_nobody_has_measured(tmp_path):
    store = ServiceStore(tmp_path)
    store.write_submitted(make_submitted(job_id="123", predicted={"weight_bytes": 10**9}))

    keeper = begin(tmp_path, job_id="123_1", tensor_parallel_size=4)
    assert keeper.record.start.checkpoint_bytes == 4 * 10**9
    keeper.add_figures({"checkpoint_bytes": 3 * 10**9})
    keeper.update(state="ready", stage="ready")
    assert keeper.record.start.checkpoint_bytes == 3 * 10**9


@pytest.mark.parametrize(("attempts_left", "is_told"), [("2", False), ("0", True), (None, True)])
def test_a_port_that_was_taken_before_there_was_a_record_is_told_after_the_last_attempt(
    tmp_path, attempts_left, is_told
):
    """Before that, the next attempt would find a record without a model in its way."""
    environ = {"HPC_SERVE_HOME": str(tmp_path / "home")}
    if attempts_left is not None:
        environ["HPC_SERVE_ATTEMPTS_LEFT"] = attempts_left
    publish_failure("8b", ALLOCATION, PortsInUseError("Port 1 of n1 was taken by another program."), environ)
    records = ServiceStore(tmp_path / "home").read("8b").records
    told = [("failed", "launcher", 75, "Port 1 of n1 was taken by another program.")] if is_told else []
    assert [(it.state, it.failed_part, it.exit_code, it.reason) for it in records] == told


# -- A job of a chain that is ready asks those before it to drain


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


def asked(store: ServiceStore, job_id: str) -> DrainRequest | None:
    return read_drain_request(drain_file(store, "8b", f"{job_id}-r0-0.json"))


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


OF_TWO = {"replicas_per_job": 2}


@pytest.mark.parametrize(
    ("there", "mine", "drains"),
    [
        ([{"job_id": "1"}, {"job_id": "2", "state": "failed"}], {"job_id": "3"}, ["1-r0-0"]),
        ([{"job_id": "1", "state": "stopped"}, {"job_id": "1", "restart": 1}], {"job_id": "2"}, ["1-r1-0"]),
        (
            [{"job_id": "1", "replica": n, **OF_TWO} for n in (0, 1)],
            {"job_id": "2", "replica": 1, **OF_TWO},
            ["1-r0-1"],
        ),
        ([{"job_id": "2"}], {"job_id": "1"}, []),
    ],
    ids=["the first where the second failed", "the last run of a job", "of replicas the same", "none that comes after"],
)
def test_those_before_it_drain_and_no_other(store, there, mine, drains):
    for fields in there:
        store.write(record(**fields))
    assert drain_predecessors(store, record(**mine), now=now) == bool(drains)
    assert [path.stem for path in store.service_dir("8b").glob("*.drain")] == drains


def test_who_was_asked_is_not_asked_again(store):
    store.write(record("1"))
    theirs = DrainRequest(by="hpc-serve stop", deadline_s=5.0, requested_at=NOW)
    ask_to_drain(drain_file(store, "8b", "1-r0-0.json"), theirs)
    assert drain_predecessors(store, record("2"), now=now)
    assert asked(store, "1") == theirs


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


async def test_one_of_no_chain_looks_once(store):
    await asyncio.wait_for(take_over(store, RecordKeeper(store, record("1"))), 60)
