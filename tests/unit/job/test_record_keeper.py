"""The record while its replica lives: one writer, though renewals are written from a thread."""

from __future__ import annotations

import asyncio
import threading

from hpc_serve.job import record_keeper
from hpc_serve.job.record_keeper import RecordKeeper
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record


class SlowStore(ServiceStore):
    """A shared filesystem that takes its time over renewals."""

    def __init__(self, home) -> None:
        super().__init__(home)
        self.is_slow = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    def write(self, record):
        if self.is_slow and record.state == "starting":
            self.entered.set()
            self.go_on.wait(60)
        return super().write(record)


def test_a_renewal_that_is_slow_to_be_written_does_not_undo_the_end(tmp_path):
    store = SlowStore(tmp_path)

    async def run():
        keeper = RecordKeeper(store, make_record(state="starting", stage="loading weights"))
        store.is_slow = True
        keeper.update(stage="compiling")
        renewals = asyncio.create_task(keeper.renew())
        await asyncio.to_thread(store.entered.wait, 60)
        threading.Timer(0.05, store.go_on.set).start()
        keeper.update(state="failed", reason="out of memory")
        store.go_on.wait(60)
        renewals.cancel()

    asyncio.run(run())
    (record,) = store.read("405b").records
    assert (record.state, record.reason, record.counter) == ("failed", "out of memory", 3)


def test_a_disk_that_is_full_ends_nothing(tmp_path, caplog):
    class FullStore(ServiceStore):
        def write(self, record):
            raise OSError(28, "No space left on device")

    async def run():
        RecordKeeper(FullStore(tmp_path), make_record()).update(state="draining")

    with caplog.at_level("WARNING", logger="hpc_serve"):
        asyncio.run(run())
    assert caplog.text.count("No space left on device") == 2


def test_a_record_says_since_when_it_is_in_its_state(tmp_path):
    async def run():
        keeper = RecordKeeper(ServiceStore(tmp_path), make_record(state_since=5.0))
        keeper.update(stage="ready", reason="none")
        assert keeper.record.state_since == 5.0
        keeper.update(state="unresponsive")
        assert keeper.record.state_since > 5.0

    asyncio.run(run())
    (record,) = ServiceStore(tmp_path).read("405b").records
    assert record.state == "unresponsive"
    assert record.updated_at >= record.state_since > 5.0


def test_the_last_record_is_tried_again_when_the_disk_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(record_keeper, "_WRITE_INTERVAL_S", 0.01)
    full = [True, True, True]

    class FullForAWhile(ServiceStore):
        def write(self, record):
            if record.state == "stopped" and full and full.pop():
                raise OSError(28, "No space left on device")
            return super().write(record)

    async def run():
        keeper = RecordKeeper(FullForAWhile(tmp_path), make_record())
        keeper.update(state="stopped", reason="the time limit")
        assert ServiceStore(tmp_path).read("405b").records[0].state == "ready"
        await keeper.finish()
        counter = ServiceStore(tmp_path).read("405b").records[0].counter
        await keeper.finish()
        assert ServiceStore(tmp_path).read("405b").records[0].counter == counter

    asyncio.run(run())
    (record,) = ServiceStore(tmp_path).read("405b").records
    assert (record.state, record.reason) == ("stopped", "the time limit")


def test_a_disk_that_stays_full_does_not_keep_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(record_keeper, "_WRITE_INTERVAL_S", 0.01)

    class FullStore(ServiceStore):
        def write(self, record):
            raise OSError(28, "No space left on device")

    async def run():
        keeper = RecordKeeper(FullStore(tmp_path), make_record())
        await asyncio.wait_for(keeper.finish(within_s=0.1), 60)

    asyncio.run(run())
