"""The store: private files, records that cannot be trusted, what is live, and what is swept."""

import errno
import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError, RecordError, StoreError
from hpc_serve.rendezvous import files
from hpc_serve.rendezvous.claims import claim
from hpc_serve.rendezvous.fields import to_json_text
from hpc_serve.rendezvous.record import JobEnd
from hpc_serve.rendezvous.store import WEEK_S, ServiceStore, default_home
from tests.support.refusals import refuse
from tests.support.strangers import give_away
from tests.support.stubs import make_record, make_submitted


def tree(folder):
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


# Where


def test_the_home_is_named_by_the_environment_or_below_the_home_directory(tmp_path, monkeypatch):
    assert default_home({"HPC_SERVE_HOME": "/shared/x", "HOME": "/home/a"}) == Path("/shared/x")
    assert default_home({"HOME": "/home/a"}) == Path("/home/a/.hpc-serve")
    assert default_home({"HPC_SERVE_HOME": "", "HOME": "/home/a"}) == Path("/home/a/.hpc-serve")
    monkeypatch.chdir(tmp_path)
    assert default_home({"HPC_SERVE_HOME": "rel"}) == tmp_path / "rel"


# Private


def test_everything_is_private_whatever_the_umask(store):
    before = os.umask(0)
    try:
        claim(store, "405b", "m")
        store.ensure_api_key("405b")
        store.write(make_record(job_id="1"))
        store.write_submitted(make_submitted())
    finally:
        os.umask(before)
    for name, mode in tree(store.home).items():
        is_folder = (store.home / name).is_dir()
        assert mode == (0o700 if is_folder else 0o600), name


def test_a_record_has_no_secret_of_an_engines_words(store):
    """Whoever may read the file, as a group may of a shared service, reads it without our reader."""
    token = "hf_" + "aB3" * 11
    path = store.write(make_record(job_id="1", state="failed", reason=f"died: {token}", last_log_lines=(token, "died")))
    text = path.read_text()
    assert token not in text
    assert "died" in text


def test_a_file_is_private_from_its_first_byte(store, monkeypatch):
    modes = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (modes.append(stat.S_IMODE(os.fstat(fd).st_mode)), fsync(fd))[1])
    store.write(make_record())
    assert modes[0] == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o2750, 0o1750])
def test_folders_that_were_left_open_are_closed_but_for_the_home(store, mode):
    """None of these modes is taken for that of a shared folder."""
    store.ensure_service("405b")
    folders = [store.home / folder for folder in ("", "services", "services/405b")]
    for folder in folders:
        folder.chmod(mode)
    store.write(make_record())
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode, 0o700, 0o700]


@pytest.mark.parametrize("which", ["", "services", "services/405b"])
def test_a_folder_of_somebody_else_is_refused(store, which):
    store.ensure_service("405b")
    give_away(store.home / which)
    with pytest.raises(StoreError, match=r"belongs to user 64999.*HPC_SERVE_HOME"):
        store.write(make_record())


def test_a_file_in_the_way_is_named(store, tmp_path):
    store.home.mkdir()
    (store.home / "services").write_text("")
    with pytest.raises(StoreError, match=r"services is in the way.* choose another folder"):
        store.write(make_record())
    with pytest.raises(StoreError, match="cannot make the folder"):
        ServiceStore(store.home / "services" / "home").ensure_service("405b")


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EROFS, "HPC_SERVE_HOME"), (errno.EDQUOT, "quota"), (errno.EFBIG, "ulimit -f"), (errno.EIO, "cannot write")],
)
def test_what_the_filesystem_refuses_is_explained(store, monkeypatch, number, advice):
    refuse(monkeypatch, os, "replace", number)
    with pytest.raises(StoreError, match=advice) as refusal:
        store.write(make_record())
    assert os.strerror(number) in str(refusal.value)
    assert isinstance(refusal.value, OSError)
    assert not [name for name in tree(store.home) if name.endswith(".tmp")], "a failed write leaves nothing behind"


# Records


def test_records_are_read_oldest_first_and_ended_ones_by_their_end(store):
    late, early = make_record(job_id="1", started_at=2.0), make_record(job_id="2", started_at=1.0)
    ended_last = make_record(job_id="3", state="failed", started_at=100.0, updated_at=900.0)
    ended_first = make_record(job_id="4", state="failed", started_at=200.0, updated_at=300.0)
    for one in (late, early, ended_last, ended_first):
        store.write(one)
    assert store.read("405b").records == (early, late, ended_first, ended_last)


def test_a_record_is_replaced_whole(store):
    record = make_record()
    path = store.write(record)
    with path.open() as before:
        store.write(replace(record, counter=9))
        assert json.load(before)["counter"] == record.counter, "who had it open reads the old one to its end"
    assert store.read("405b").records == (replace(record, counter=9),)


def test_the_record_of_an_end_is_written_over_the_last_one_on_a_full_disk(store, monkeypatch):
    record = make_record(stage="x" * 200)
    path = store.write(record)
    end = replace(record, state="stopped", stage="stopped", reason="hpc-serve stop on login")
    refuse(monkeypatch, os, "replace", errno.ENOSPC)
    with pytest.raises(StoreError, match="No space left"):
        store.write(replace(record, counter=9))
    assert store.read("405b").records == (record,)
    store.write(end)
    assert store.read("405b").records == (end,)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StoreError, match="No space left"):
        store.write(replace(end, state="failed", last_log_lines=("y" * 10_000,)))
    assert store.read("405b").records == (end,), "what needs more room than there is spoils nothing"
    with pytest.raises(StoreError, match="No space left"):
        store.write(replace(end, job_id="124"))


def test_reading_and_sweeping_make_nothing(store):
    assert store.read("405b").records == ()
    assert store.services() == ()
    assert store.sweep("405b") == 0
    assert not store.home.exists()


def test_names_are_checked_before_they_are_paths(store):
    for name in ("../x", "a/b", ""):
        with pytest.raises(InvalidRequestError):
            store.read(name)
    with pytest.raises(InvalidRequestError):
        store.write(make_record(job_id="../../x"))


def test_services_are_those_with_a_folder(store):
    for name in ("b", "a"):
        store.ensure_service(name)
    (store.home / "services" / "a file").write_text("")
    (store.home / "services" / "file").write_text("")
    (store.home / "services" / ".hidden").mkdir()
    assert store.services() == ("a", "b")


def test_files_that_cannot_be_trusted_are_problems(store):
    good = make_record(job_id="1")
    store.write(good)
    folder = store.service_dir("405b")
    (folder / "2-r0-0.json").write_text(to_json_text(good)[:40])
    (folder / "3-r0-0.json").write_bytes(b"\xff\xfe")
    (folder / "4-r0-0.json").write_text(to_json_text(good))
    (folder / "5-r0-0.json").symlink_to("1-r0-0.json")
    os.mkfifo(folder / "6-r0-0.json")
    (folder / "7-r0-0.json").mkdir()
    (folder / "8-r0-0.json").write_text(to_json_text(make_record(job_id="8", service="other")))
    (folder / "9-r0-0.json").write_text("x" * (files._MAX_FILE_BYTES + 1))
    open_before = os.listdir("/proc/self/fd")
    found = store.read("405b")
    assert os.listdir("/proc/self/fd") == open_before
    assert found.records == (good,)
    assert found.unreadable == {f"{number}-r0-0.json" for number in range(2, 10)}
    for number, why in [
        *[(2, "half-written"), (3, "not text"), (4, "it was copied"), (5, "symbolic link")],
        *[(6, "not a regular file"), (7, "not a regular file"), (8, "it was copied"), (9, "longer than")],
    ]:
        (problem,) = [problem for problem in found.problems if f"{number}-r0-0.json" in problem]
        assert why in problem.lower()


def test_a_record_or_a_key_of_somebody_else_is_not_trusted(store):
    give_away(store.write(make_record()))
    found = store.read("405b")
    assert (found.records, "belongs to user 64999" in found.problems[0]) == ((), True)
    give_away(store.ensure_api_key("405b"))
    with pytest.raises(RecordError, match="belongs to user 64999"):
        store.ensure_api_key("405b")


def test_a_file_that_is_listed_and_gone_is_no_problem(store, monkeypatch):
    store.write(make_record())
    stale = "hpc_serve.rendezvous.store.list_newest_first"
    monkeypatch.setattr(stale, lambda path: [("9-r0-0.json", (0, 0, 0)), *files.list_newest_first(path)])
    found = store.read("405b")
    assert (len(found.records), found.problems) == (1, ())


@pytest.mark.parametrize(("failures", "is_read"), [(2, True), (9, False)])
def test_a_stale_handle_is_opened_again_a_few_times(store, monkeypatch, failures, is_read):
    store.write(make_record())
    left, opening = iter(range(failures)), os.open

    def stale(path, flags, *rest):
        if str(path).endswith("-r0-0.json") and next(left, None) is not None:
            raise OSError(errno.ESTALE, "Stale file handle")
        return opening(path, flags, *rest)

    monkeypatch.setattr(os, "open", stale)
    found = store.read("405b")
    assert len(found.records) == is_read
    assert is_read or "Stale file handle" in found.problems[0]


def test_jobs_without_a_record_are_known(store):
    for job_id in ("7", "8", "9"):
        store.write_submitted(make_submitted(job_id=job_id))
    store.write(make_record(job_id="8"))
    store.write(make_record(job_id="9_2"))
    found = store.read("405b")
    assert [entry.job_id for entry in found.submitted] == ["7", "8", "9"]
    assert [entry.job_id for entry in found.without_record()] == ["7"]
    assert store.read_submitted("405b") == found.submitted


# Sweeping


def test_what_is_over_for_a_week_is_swept(store):
    old = time.time() - WEEK_S - 60
    store.write(make_record(job_id="1", state="stopped", updated_at=old))
    store.write(make_record(job_id="2", state="starting", updated_at=old))
    store.write(make_record(job_id="3", state="stopped"))
    store.write(make_record(job_id="4"))
    for number in ("1", "3", "5"):
        store.write_submitted(make_submitted(job_id=number, submitted_at=old))
    leftover = store.service_dir("405b") / ".1-r0-0.json.abc.tmp"
    leftover.write_text("")
    os.utime(leftover, (old, old))
    fresh = store.service_dir("405b") / ".3-r0-0.json.abc.tmp"
    fresh.write_text("")
    assert store.sweep("405b") == 5
    found = store.read("405b")
    assert [record.job_id for record in found.records] == ["3", "4"]
    assert [entry.job_id for entry in found.submitted] == ["5"], "it may still wait in the queue"
    assert fresh.exists()
    assert not leftover.exists()
    assert store.sweep("405b", is_over=lambda holder: True) == 1
    assert store.read_submitted("405b") == ()


def test_a_job_whose_end_is_written_down_awaits_no_record(store):
    store.write_submitted(
        make_submitted(end=JobEnd(state="stopped", reason="it was cancelled", at=1.0), submitted_at=1.0)
    )
    found = store.read("405b")
    assert (found.without_record(), found.awaiting_record()) == (found.submitted, ())
    assert store.sweep("405b") == 1


def test_a_job_stays_forgotten_for_a_week(store):
    store.write(make_record(job_id="1_2", state="stopped"))
    store.forget("405b", {"1_2", "7"})
    assert store.read("405b").records == ()
    assert [store.is_forgotten("405b", job_id) for job_id in ("1_2", "7", "1")] == [True, True, False]
    old = time.time() - WEEK_S - 60
    os.utime(store.service_dir("405b") / "7.forgotten", (old, old))
    assert store.sweep("405b") == 1
    assert [store.is_forgotten("405b", job_id) for job_id in ("1_2", "7")] == [True, False]


# What is live: all but the records that have ended, each of which is read once


@pytest.fixture
def six(store):
    """The store with a record of each state; two have ended."""
    for number, state in enumerate(["stopped", "failed", "ready", "starting", "draining", "unresponsive"]):
        store.write(make_record(job_id=str(number), state=state, started_at=1000.0 + number))
    return store


@pytest.fixture
def opened(monkeypatch):
    """The names of the records that were read."""
    names, read_private = [], files.read_private

    def read(path, **options):
        names.append(path.name)
        return read_private(path, **options)

    monkeypatch.setattr("hpc_serve.rendezvous.store.read_private", read)
    return names


def jobs(found):
    return [record.job_id for record in found.records]


def test_what_has_ended_is_left_out_and_the_rest_is_what_the_store_reads(six):
    found = six.live("405b").read_all()
    assert found.records == tuple(record for record in six.read("405b").records if not record.is_final)
    assert jobs(found) == ["2", "3", "4", "5"]
    assert found.unreadable == frozenset()


def test_an_ended_record_is_read_once(six, opened):
    records = six.live("405b")
    records.read_all()
    assert len(opened) == 6
    opened.clear()
    records.read_all()
    assert sorted(opened) == [f"{number}-r0-0.json" for number in (2, 3, 4, 5)]
    opened.clear()
    assert "0" in jobs(records.read_all({"0-r0-0.json"}))


def test_a_file_that_takes_the_place_of_an_ended_record_is_read(six):
    records = six.live("405b")
    records.read_all()
    six.write(make_record(job_id="0", state="ready", counter=7))
    assert "0" in jobs(records.read_all())


def test_what_was_written_last_comes_first(six):
    for age_s, job_id in ((1, "3"), (0, "2")):  # a filesystem's clock may show the same time for both
        six.write(make_record(job_id=job_id, state="ready"))
        at_s = time.time() + 60 - age_s
        os.utime(six.service_dir("405b") / f"{job_id}-r0-0.json", (at_s, at_s))
    files, names = six.live("405b").files()
    assert [name for name, _ in files[:2]] == ["2-r0-0.json", "3-r0-0.json"]
    assert len(names) == 6


def test_a_foreign_record_is_not_taken_for_an_ended_one(six):
    record = six.service_dir("405b") / "0-r0-0.json"
    give_away(record)
    records = six.live("405b")
    for _ in range(2):
        assert "belongs to user 64999" in records.read_all().problems[0]


def test_submitted_jobs_are_those_without_a_record(six):
    for job in ("2", "0", "77", "88"):
        six.write_submitted(make_submitted(job_id=job))
    six.write(replace(make_record(job_id="88_1"), state="stopped"))
    found = six.live("405b").read_all()
    assert [job.job_id for job in found.submitted] == ["77"]
    assert found.without_record() == six.read("405b").without_record()
