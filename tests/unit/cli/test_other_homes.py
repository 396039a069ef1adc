"""Jobs of Slurm's whose records are in another home: they are shown, and only `stop JOB --now` ends them."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import make_record, make_submitted

ELSEWHERE = "/elsewhere/home"


@pytest.fixture
def slurm(stand_ins: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Job 9 runs as 8b, with its records in another home."""
    stand_ins.queue(("9", "RUNNING", "None"), name="hpc-serve-8b", run_time="1:05:00")
    stand_ins.job("9", "RUNNING", name="hpc-serve-8b", log=f"{ELSEWHERE}/services/8b/logs/9.log")
    return stand_ins


def job_of_this_home(store: ServiceStore, slurm: FakeSlurm) -> None:
    """Job 7 waits, as a replica of 8b too."""
    script = store.ensure_service("8b") / "8b.sh"
    script.write_text("#!/bin/bash\n")
    script.chmod(0o600)
    log = str(store.log_dir("8b") / "7.log")
    job = make_submitted(service="8b", job_id="7", submitted_at=time.time(), script=str(script), log_path=log)
    store.write_submitted(job)
    jobs = (("7", "PENDING", "Resources"), ("9", "RUNNING", "None"))
    slurm.queue(*jobs, name="hpc-serve-8b", run_time="1:05:00")
    slurm.job("7", "CANCELLED", after_cancel=True, name="hpc-serve-8b", nodes="")


@pytest.mark.parametrize(
    "words",
    [
        *(["stop", "8b"], ["stop", "8b", "--now"], ["stop", "9"], ["scale", "8b", "2"], ["scale", "8b", "1:2"]),
        *(["wake", "8b"], ["forget", "9"], ["forget", "8b"]),
    ],
)
def test_nothing_is_done_to_a_job_of_another_home_and_that_home_is_named(words, slurm, ran):
    said = ran(words, 5).err
    assert "8b (job 9) has no record in " in said
    assert f"set HPC_SERVE_HOME={ELSEWHERE}, or end it without a drain: hpc-serve stop 9 --now" in said
    assert slurm.cancelled == []
    assert slurm.scripts == []


def test_a_job_that_was_given_to_sbatch_by_hand_has_a_home_that_nobody_can_name(slurm, ran):
    slurm.job("9", "RUNNING", name="hpc-serve-8b", log="/home/alice/hpc-serve-8b-9.log")
    assert "set the HPC_SERVE_HOME that it was submitted with, or end it" in ran(["stop", "8b"], 5).err
    assert slurm.cancelled == []


def test_stop_of_a_job_by_its_id_and_now_ends_it_and_says_so(store, slurm, ran):
    store.ensure_service("8b")
    change_wanted(store, "8b", lambda _: Wanted(least=1, most=2, count=0, state="asleep"))
    slurm.job("9", "CANCELLED", after_cancel=True, name="hpc-serve-8b", nodes="n1")
    assert ran(["stop", "9", "--now"]).out == (
        f"There is no record of job 9 in {store.home}: it is ended without a drain.\n"
        "Stopping 8b (job 9), which is unknown ...\n"
        "8b (job 9) is over: stopped: it was cancelled (CANCELLED)\n"
    )
    assert slurm.cancelled == ["9"]
    assert read_wanted(store, "8b").state == "asleep", "the service of that name here was not stopped"


def test_the_jobs_of_this_home_are_stopped_and_the_other_is_told(store, slurm, ran):
    job_of_this_home(store, slurm)
    said = ran(["stop", "8b"]).out
    assert "8b (job 7) is over: stopped: it was cancelled before it began" in said
    assert f"8b (job 9) has no record in {store.home}, so nothing was done: set HPC_SERVE_HOME={ELSEWHERE}" in said
    assert slurm.cancelled == ["7"]


def test_replicas_of_another_home_are_not_counted(store, slurm, ran):
    job_of_this_home(store, slurm)
    assert "8b has 1 replica, as before." in ran(["scale", "8b", "1"]).out
    assert "8b needs no waking: job 7 is pending." in ran(["wake", "8b"]).out
    assert (slurm.cancelled, slurm.scripts) == ([], [])


def test_another_home_keeps_no_service_from_being_woken(store, slurm, ran):
    job_of_this_home(store, slurm)
    submitted = dataclasses.replace(store.read_submitted("8b")[0], end=None)
    store.write(make_record(service="8b", job_id="7", model=submitted.model, state="stopped", reason="idle"))
    slurm.queue(("9", "RUNNING", "None"), name="hpc-serve-8b", run_time="1:05:00")
    assert "8b: submitted as job 101_0" in ran(["wake", "8b"]).out


@pytest.mark.parametrize("words", [["status"], ["status", "8b"], ["status", "9"], ["top", "--once"]])
def test_it_is_shown_all_the_same(words, slurm, ran):
    assert "its records are not in" in " ".join(ran(words).out.split())
