"""Whose run is over: its folder in the shared home goes, by what records say; every other stays."""

from __future__ import annotations

import os
import time

import pytest

from hpc_serve.job.cleanup.node_dir import make_run_dir, remove_old_run_dirs, remove_run_dir
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.stubs import make_record

MINUTE_S, DAY_S = 60.0, 86_400.0


@pytest.fixture
def store(tmp_path):
    return ServiceStore(tmp_path / "home")


def run_dir(store, job_id, age_s):
    allocation = read_allocation({"HPC_SERVE_CLUSTER": "local", "HPC_SERVE_JOB_ID": job_id})
    path = make_run_dir(store.home, allocation)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def record(store, job_id, state, age_s):
    then = time.time() - age_s
    store.write(make_record(job_id=job_id, state=state, started_at=then, updated_at=then))


@pytest.mark.parametrize(
    ("state", "silent_s", "is_over"),
    [
        ("ready", 5.0, False),
        ("starting", 6 * DAY_S, False),  # its job may be suspended
        ("ready", 8 * DAY_S, True),
        ("failed", 5 * MINUTE_S, False),  # it may still be ending, by another node's clock
        ("failed", 20 * MINUTE_S, True),
        ("stopped", 20 * MINUTE_S, True),
        (None, 6 * DAY_S, False),
        (None, 8 * DAY_S, True),
    ],
)
def test_a_run_is_over_by_its_record_or_after_a_week_of_silence(store, state, silent_s, is_over):
    path = run_dir(store, "12", max(silent_s, DAY_S))
    if state is not None:
        record(store, "12", state, silent_s)
    remove_old_run_dirs(store)
    assert path.exists() is not is_over


def test_an_earlier_run_of_a_requeued_job_is_over_and_the_present_one_is_not(store):
    record(store, "12", "stopped", DAY_S)
    old = run_dir(store, "12", DAY_S)
    now = old.rename(old.with_name(old.name.replace("-r0-", "-r1-")))
    old = run_dir(store, "12", DAY_S)
    remove_old_run_dirs(store)
    assert (old.exists(), now.exists()) == (False, True)


def test_what_is_no_folder_of_a_run_stays(store, tmp_path):
    store.ensure_service("8b")
    jobs, elsewhere = store.home / "jobs", tmp_path / "thesis"
    for path in (jobs, elsewhere, jobs / "notes", jobs / "1-r0-0000abcd"):
        path.mkdir(mode=0o755)
    (jobs / "2-r0-0000abcd").symlink_to(elsewhere)
    for path in jobs.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    os.utime(elsewhere, (0, 0))
    remove_old_run_dirs(store)
    assert sorted(path.name for path in jobs.iterdir()) == ["1-r0-0000abcd", "2-r0-0000abcd", "notes"]
    remove_run_dir(elsewhere)
    assert elsewhere.exists()


def test_a_home_without_jobs_is_no_error(store):
    remove_old_run_dirs(store)
