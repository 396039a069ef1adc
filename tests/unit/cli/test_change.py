"""`stop` and `forget`, and what `scale` and `wake` do beside jobs whose records are in another home."""

from __future__ import annotations

import dataclasses
import time

import pytest

from hpc_serve.cli.main import run
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Wanted
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import make_record, make_submitted


def test_stop_tells_how_it_ended(store, stand_ins, ran):
    ran(["submit", "8b"])
    stand_ins.job("101", "CANCELLED", after_cancel=True)
    out = ran(["stop", "8b"]).out
    assert "Stopping 8b (job 101), which is pending ..." in out
    assert "8b (job 101) is over: stopped: it was cancelled (CANCELLED)" in out
    assert read_wanted(store, "8b").decided[-1].why == "stopped by hpc-serve stop"  # a gateway runs it, too
    assert ran(["stop", "8b"]).out == "8b is not running.\n"
    assert "it was cancelled (CANCELLED)" in ran(["status", "8b"]).out


@pytest.mark.parametrize("command", ["stop", "forget", "wait", "scale", "wake", "logs", "status"])
def test_an_empty_name_as_of_a_variable_that_is_not_set_means_no_service(store, stand_ins, failed_job, ran, command):
    ran(["submit", "8b"])
    failed_job("7")
    before = store.read("8b")
    assert "'' cannot name a service" in ran([command, "", *(["2"] if command == "scale" else [])], 2).err
    assert not stand_ins.cancelled
    assert store.read("8b") == before


def test_stop_of_one_replica_leaves_the_others(store, stand_ins, ran):
    for _ in range(2):
        ran(["submit", "8b"])
    stand_ins.job("102", "CANCELLED", after_cancel=True)
    assert "101" not in ran(["stop", "8b", "--replica", "102"]).out
    assert stand_ins.cancelled == ["102"]
    stand_ins.job("101", "CANCELLED", after_cancel=True)
    ran(["stop", "--replica", "101", "--now"])
    assert stand_ins.cancelled == ["102", "101"]
    assert "8b has no replica 99" in ran(["stop", "8b", "--replica", "99"], 2).err


@pytest.mark.parametrize(("words", "code"), [("8b -- -h", 2), ("8b nope", 5), ("8b nope --now", 5)])
def test_stop_ends_nothing_if_one_of_its_names_is_wrong(store, stand_ins, ran, words, code):
    ran(["submit", "8b"])
    ran(["stop", *words.split()], code)
    assert stand_ins.cancelled == []
    assert read_wanted(store, "8b").state == "awake"


def test_stop_tells_clients_of_a_job_that_was_cancelled_by_other_means(store, stand_ins, ran):
    ran(["submit", "8b"])
    stand_ins.queue()
    stand_ins.job("101", "CANCELLED", nodes="")
    assert "Wait for it" in ran(["chat", "8b", "hi"], 5).err
    ran(["stop", "8b"])
    assert "8b is stopped: it was cancelled before it began" in ran(["chat", "8b", "hi"], 5).err


def test_what_is_over_can_be_forgotten(store, failed_job, ran, told):
    failed_job("7")
    failed_job("8")
    log = store.log_dir("8b") / "7-node0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("line\n")
    assert ran(["forget", "7"]).out == "Forgotten: 7.\n"
    assert [one["job_id"] for one in told("status", "--all")["services"]] == ["8"]
    ran(["forget", "8b"])
    assert "No services" in ran(["status"]).out
    assert log.exists()


def test_records_are_not_read_for_each_job(failed_job, monkeypatch, ran):
    for number in range(12):
        failed_job(str(number))
    opened, read = [], ServiceStore.read
    monkeypatch.setattr(ServiceStore, "read", lambda self, service: opened.append(service) or read(self, service))
    assert len(ran(["forget", "8b"]).out.split(", ")) == 12
    assert len(opened) <= 4


def test_what_is_not_over_stays(store, stand_ins, failed_job, ran):
    failed_job("7")
    store.write_submitted(make_submitted(service="8b", job_id="9", submitted_at=time.time()))
    stand_ins.queue(("9", "PENDING", "Resources"))
    assert "8b (job 9) is pending, not over: hpc-serve stop 9 first." in ran(["forget", "9"], 2).err
    assert ran(["forget", "--ended"]).out == "Forgotten: 7.\n"
    assert ran(["forget", "8b"]).out == "There is nothing to forget: no job is over.\n"
    assert [job.job_id for job in store.read_submitted("8b")] == ["9"]


def test_what_slurm_alone_knows_can_be_forgotten_too(stand_ins, ran):
    stand_ins.job("9", "FAILED", exit_code="1:0", name="hpc-serve-8b")
    assert ran(["forget", "8b"]).out == "Forgotten: 9.\n"
    assert "No services" in ran(["status", "--all"]).out


@pytest.mark.parametrize("words", [["--ended"], ["7"], ["8b"]])
def test_what_is_forgotten_is_hidden_while_slurm_lists_it(stand_ins, failed_job, capsys, ran, words):
    failed_job(state="stopped", reason="it was stopped: no request was under way")
    stand_ins.job("7", "COMPLETED", name="hpc-serve-8b")
    stand_ins.queue(("11", "RUNNING", "None"), name="hpc-serve-8b")
    ran(["forget", *words])
    for command in ("status --all", "status 8b --all", "doctor 8b", "logs 8b"):
        run(command.split())
        said = "".join(capsys.readouterr())
        assert "ended without an error" not in said
        assert "job 7" not in said
    stand_ins.queue(("7", "PENDING", "Resources"), name="hpc-serve-8b")  # somebody has requeued it
    assert "8b  job 7" in ran(["status", "8b"]).out


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
    "words", ["stop 8b", "stop 8b --now", "stop 9", "scale 8b 2", "scale 8b 1:2", "wake 8b", "forget 9", "forget 8b"]
)
def test_nothing_is_done_to_a_job_of_another_home_and_that_home_is_named(words, slurm, ran):
    said = ran(words.split(), 5).err
    assert "8b (job 9) has no record in " in said
    assert f"set HPC_SERVE_HOME={ELSEWHERE}, or end it without a drain: hpc-serve stop 9 --now" in said
    assert (slurm.cancelled, slurm.scripts) == ([], [])


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


def test_jobs_of_this_home_alone_are_counted_and_stopped_and_the_other_is_told(store, slurm, ran):
    job_of_this_home(store, slurm)
    assert "8b has 1 replica, as before." in ran(["scale", "8b", "1"]).out
    assert "8b needs no waking: job 7 is pending." in ran(["wake", "8b"]).out
    assert (slurm.cancelled, slurm.scripts) == ([], [])
    said = ran(["stop", "8b"]).out
    assert "8b (job 7) is over: stopped: it was cancelled before it began" in said
    assert f"8b (job 9) has no record in {store.home}, so nothing was done: set HPC_SERVE_HOME={ELSEWHERE}" in said
    assert slurm.cancelled == ["7"]


def test_another_home_keeps_no_service_from_being_woken(store, slurm, ran):
    job_of_this_home(store, slurm)
    submitted = dataclasses.replace(store.read_submitted("8b")[0], end=None)
    store.write(make_record(service="8b", job_id="7", model=submitted.model, state="stopped", reason="idle"))
    slurm.queue(("9", "RUNNING", "None"), name="hpc-serve-8b", run_time="1:05:00")
    assert "8b: submitted as job 101_0" in ran(["wake", "8b"]).out


@pytest.mark.parametrize("words", ["status", "status 8b", "status 9", "top --once"])
def test_it_is_shown_all_the_same(words, slurm, ran):
    assert "its records are not in" in " ".join(ran(words.split()).out.split())
