"""Reading what is live: the same records as the store reads, without those that have ended, and each of those once."""

import os
import time
from dataclasses import replace

import pytest

from hpc_serve.rendezvous import store as store_module
from hpc_serve.rendezvous.files import read_private
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.strangers import give_away
from tests.support.stubs import make_record, make_submitted


@pytest.fixture
def store(tmp_path):
    store = ServiceStore(tmp_path / "home")
    for number, state in enumerate(["stopped", "failed", "ready", "starting", "draining", "unresponsive"]):
        store.write(make_record(job_id=str(number), state=state, started_at=1000.0 + number))
    return store


@pytest.fixture
def opened(monkeypatch):
    """The names of the records that were read."""
    names = []

    def read(path, **options):
        names.append(path.name)
        return read_private(path, **options)

    monkeypatch.setattr(store_module, "read_private", read)
    return names


def jobs(found):
    return [record.job_id for record in found.records]


def test_what_has_ended_is_left_out_and_the_rest_is_what_the_store_reads(store):
    found = store.live("405b").read_all()
    assert found.records == tuple(record for record in store.read("405b").records if not record.is_final)
    assert jobs(found) == ["2", "3", "4", "5"]
    assert found.unreadable == frozenset()


def test_an_ended_record_is_read_once(store, opened):
    records = store.live("405b")
    records.read_all()
    assert len(opened) == 6
    opened.clear()
    records.read_all()
    assert sorted(opened) == [f"{number}-r0-0.json" for number in (2, 3, 4, 5)]
    opened.clear()
    assert "0" in jobs(records.read_all({"0-r0-0.json"}))


def test_a_file_that_takes_the_place_of_an_ended_record_is_read(store):
    records = store.live("405b")
    records.read_all()
    store.write(make_record(job_id="0", state="ready", counter=7))
    assert "0" in jobs(records.read_all())


def test_what_was_written_last_comes_first(store):
    for age_s, job_id in ((1, "3"), (0, "2")):  # a filesystem's clock may show the same time for both
        store.write(make_record(job_id=job_id, state="ready"))
        at_s = time.time() + 60 - age_s
        os.utime(store.service_dir("405b") / f"{job_id}-r0-0.json", (at_s, at_s))
    files, names = store.live("405b").files()
    assert [name for name, _ in files[:2]] == ["2-r0-0.json", "3-r0-0.json"]
    assert len(names) == 6


def test_a_foreign_record_is_not_taken_for_an_ended_one(store):
    record = store.service_dir("405b") / "0-r0-0.json"
    give_away(record)
    records = store.live("405b")
    for _ in range(2):
        assert "belongs to user 64999" in records.read_all().problems[0]


def test_submitted_jobs_are_those_without_a_record(store):
    for job in ("2", "0", "77", "88"):
        store.write_submitted(make_submitted(job_id=job))
    store.write(replace(make_record(job_id="88_1"), state="stopped"))
    found = store.live("405b").read_all()
    assert [job.job_id for job in found.submitted] == ["77"]
    assert found.without_record() == store.read("405b").without_record()
