"""The programs that keep a service, and the commands that say what is wanted; stub engines, stand-ins for Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from functools import partial

import pytest

from hpc_serve.cli.main import run as run_command
from hpc_serve.errors import (
    HpcServeError,
    InvalidRequestError,
    RecordError,
    ServiceAsleepError,
    ServiceNotFoundError,
    StoreError,
    SubmissionRefusedError,
)
from hpc_serve.rendezvous.claims import change_wanted, read_wanted
from hpc_serve.rendezvous.store import DrainRequest, ask_to_drain, drain_file, read_drain_request
from hpc_serve.rendezvous.wanted import Decision, Wanted
from hpc_serve.submit.request.options import SlurmOptions
from hpc_serve.submit.services.carry_out import settle
from hpc_serve.submit.services.jobs import Windows
from hpc_serve.submit.services.service_keeper import Keeper, run, submission_environ
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.services.want import scale, wake, want_stop_of
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.status.status_reader import read_status
from tests.cluster import wait_for
from tests.support.at_once import at_once
from tests.support.stubs import StubService, make_record
from tests.unit.job.starts import Clock
from tests.unit.submit.service_8b import MODEL, before_sbatch, script, submit

SERVICE = "8b"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stubs(engines, slurm):
    """The service of job 101, submitted with --replicas 1:4 --idle-stop 2m; its engine works on two at once."""
    submit(replicas=1, max_replicas=4, idle_stop_s=120.0)
    start(engines, "101")
    queue(slurm, "101")
    return engines


def start(stubs: StubService, job_id: str, **fields):
    return stubs.start("--stub-slots", "2", "--stub-first-s", "600", job_id=job_id, model=MODEL, **fields)


def queue(slurm, *running: str, **fields) -> None:
    slurm.queue(*((job_id, "RUNNING", "None") for job_id in running), name=f"hpc-serve-{SERVICE}", **fields)


@pytest.fixture
def job(store, stubs, clock):
    """The program of job 101."""
    return keeper(store, clock, "101")


ASKED = Wanted(least=1, most=4, count=1, is_kept=True, idle_stop_s=120.0)


def keeper(store, clock, job_id: str, asked: Wanted = ASKED) -> Keeper:
    windows = Windows(add_after_s=20.0, leave_after_s=60.0)
    one = Keeper(store=store, service=SERVICE, job_id=job_id, asked=asked, windows=windows, clock=clock)
    one.looker.slurm = SchedulerView(max_age_s=0.0)
    return one


def go_on(one: Keeper, for_s: float) -> None:
    """Let so much time pass, a look each five seconds."""
    for _ in range(int(for_s / 5)):
        look(one)


def look(one: Keeper) -> float | None:
    assert isinstance(one.clock, Clock)
    one.clock.now += 5.0
    return one.step()


def wanted(store) -> Wanted:
    return read_wanted(store, SERVICE)


def change(store, **fields) -> None:
    change_wanted(store, SERVICE, lambda found: replace(found, **fields))


def asked_to_drain(store, job_id: str) -> DrainRequest | None:
    return read_drain_request(drain_file(store, SERVICE, f"{job_id}-r0-0.json"))


def requests(stubs: StubService, job: Keeper, count: int, *, waiting: int) -> None:
    """So many requests to the first engine, which do not end; returns once so many wait."""
    key = stubs.key_file.read_text().strip()
    body = json.dumps({"model": "405b", "prompt": "x", "max_tokens": 3}).encode()
    url = f"https://127.0.0.1:{stubs.engines[0].port}/v1/completions"
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask() -> None:
        with contextlib.suppress(OSError):
            asked = urllib.request.Request(url, body, headers)
            urllib.request.urlopen(asked, context=ssl._create_unverified_context(), timeout=600)

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()
    job.step()
    wait_for(lambda: job.looker.look().load.waiting == waiting, 60, what="requests that wait")


def told(store) -> list[tuple[str, str]]:
    return [(one.action, one.cause) for one in wanted(store).decided]


class TestWhoDecides:
    def test_of_two_at_once_one(self, store, slurm, stubs, clock):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        pair = [keeper(store, clock, "101"), keeper(store, clock, "102_0")]
        at_once(*(one.step for one in pair))
        assert sorted(one.is_deciding for one in pair) == [False, True]

    def test_one_that_died_is_replaced_after_the_lease(self, job, store, slurm, stubs, clock):
        job.step()
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        other = keeper(store, clock, "102_0")
        go_on(other, 30)
        assert wanted(store).decider == "101-r0-0.json"
        go_on(other, 5)
        assert wanted(store).decider == "102_0-r0-0.json"
        job.step()  # it was frozen, and sees that
        assert not job.is_deciding
        assert wanted(store).decider == "102_0-r0-0.json"

    def test_one_that_drains_lets_another_decide_at_once(self, job, store, stubs):
        job.step()
        path = drain_file(store, SERVICE, "101-r0-0.json")
        ask_to_drain(path, DrainRequest(by="Slurm, before the time limit", deadline_s=10))
        assert job.step() is None
        assert wanted(store).decider == ""

    def test_one_that_starts_does_not_decide(self, store, slurm, stubs, clock):
        stubs.publish(stubs.engines[0], job_id="101", model=MODEL, state="starting")
        keeper(store, clock, "101").step()
        assert wanted(store).decider == ""

    @pytest.mark.parametrize("state", ["awake", "stopped"])
    def test_what_a_damaged_file_said_last_is_wanted_still(self, job, store, slurm, stubs, ran, state):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        change(store, least=2, most=3, count=2, state=state)
        job.step()
        (store.service_dir(SERVICE) / "wanted.json").write_text("")
        assert "wanted.json is not JSON" in ran(["status", SERVICE]).err
        go_on(job, 20)
        if state == "awake":
            found = wanted(store)
            assert (found.least, found.most, found.count, found.idle_stop_s) == (2, 3, 2, 120.0)
        else:
            assert not (store.service_dir(SERVICE) / "wanted.json").read_text()
        assert (asked_to_drain(store, "101"), asked_to_drain(store, "102_0")) == (None, None)

    @pytest.mark.parametrize("command", ["scale 8b 2", "scale 8b 1:2", "wake 8b", "submit --model 8b --keep-up"])
    def test_no_command_decides_by_a_damaged_file(self, job, store, stubs, ran, command):
        (store.service_dir(SERVICE) / "wanted.json").write_text("")
        assert re.search(
            r"is unknown\. Wait a minute .* remove it\. Then give its options", ran(command.split(), 5).err
        )
        assert not (store.service_dir(SERVICE) / "wanted.json").read_text()
        job.step()
        assert ran(["scale", SERVICE, "1:2"]).out

    def test_a_damaged_file_of_a_job_is_named_where_its_script_is_missed(self, store, stubs, ran):
        (store.service_dir(SERVICE) / "submitted" / "101.json").write_text("{")
        assert "101.json is not JSON" in ran(["scale", SERVICE, "2"], 2).err

    def test_what_is_stopped_with_a_damaged_file_stays_so(self, store, slurm, stubs, clock):
        kept = keeper(store, clock, "101", replace(ASKED, keep_up=True))
        kept.step()
        (store.service_dir(SERVICE) / "wanted.json").write_text("")
        with pytest.raises(RecordError):
            want_stop_of(store, read_status(store, SERVICE).replicas)
        ask_to_drain(drain_file(store, SERVICE, "101-r0-0.json"), DrainRequest(by="a person", deadline_s=10))
        go_on(kept, 60)
        assert (wanted(store).state, len(slurm.scripts)) == ("stopped", 1)

    def test_what_its_script_asks_for_where_nothing_is_written(self, job, store, stubs):
        (store.service_dir(SERVICE) / "wanted.json").unlink()
        job.step()
        found = wanted(store)
        assert (found.least, found.most, found.idle_stop_s, found.decider) == (1, 4, 120.0, "101-r0-0.json")

    def test_without_sbatch_on_the_node_status_says_so(self, job, store, slurm, stubs):
        (slurm.bin / "sbatch").unlink()
        if not any(os.access(f"{folder}/sbatch", os.X_OK) for folder in os.environ["PATH"].split(":")):
            job.step()
            assert "There is no `sbatch` here" in wanted(store).problem


class TestLoad:
    def test_requests_that_wait_bring_more(self, job, store, slurm, stubs, ran):
        requests(stubs, job, 7, waiting=5)
        go_on(job, 35)
        assert slurm.scripts[1:] == slurm.scripts[:1]
        assert "--array=0-2" in slurm.sbatch_words[-1]
        assert (wanted(store).coming, wanted(store).submitting) == (("101", "102_0", "102_1", "102_2"), 0)
        assert told(store) == [("count", "load"), ("submit", "load")]
        assert "submitted 3: 5 requests waited for 20 s" in ran(["status", SERVICE]).out
        go_on(job, 60)  # nothing more while they come
        assert len(slurm.scripts) == 2

    def test_one_that_fails_makes_the_next_wait(self, job, store, slurm, stubs, ran):
        requests(stubs, job, 3, waiting=1)
        go_on(job, 40)
        slurm.job("102_0", "FAILED", exit_code="1:0")
        queue(slurm, "101")
        before = time.time()
        go_on(job, 5)
        found = wanted(store)
        assert (found.failures, found.coming, found.count) == (1, ("101",), 2)
        assert found.problem.startswith("job 102_0, which was added, failed: ")
        assert before + 30 <= found.next_try_at <= time.time() + 30
        change(store, next_try_at=found.next_try_at + 600)  # a slow machine
        go_on(job, 40)
        assert len(slurm.scripts) == 2
        assert "; trying again at " in ran(["status", SERVICE]).out
        change(store, next_try_at=time.time())
        go_on(job, 10)
        assert len(slurm.scripts) == 3

    def test_one_that_is_not_needed_drains(self, job, store, slurm, stubs):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        change(store, count=2, most_running=2)
        go_on(job, 80)
        request = asked_to_drain(store, "102_0")
        assert request.by == "hpc-serve: the other could have carried the load for 1 min: no request"
        assert (request.cause, asked_to_drain(store, "101")) == ("surplus", None)
        go_on(job, 30)
        assert wanted(store).state == "awake"

    def test_one_that_waits_in_the_queue_is_cancelled_and_has_not_failed(self, job, store, slurm, stubs):
        requests(stubs, job, 3, waiting=1)
        go_on(job, 40)
        slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
        assert run_command(["scale", SERVICE, "1:1"]) == 0
        go_on(job, 15)
        assert slurm.cancelled == ["102_0"]
        found = wanted(store)
        assert (found.failures, found.problem, found.ending) == (0, "", ())


class TestTimeLimit:
    @pytest.fixture
    def kept(self, store, engines, slurm, clock):
        """The program of job 101, which took 100 s to be ready and has ten minutes left."""
        submit(keep_up=True)
        start(engines, "101", measured={"start_s": 100.0})
        queue(slurm, "101", time_left={"101": "10:00"})
        return keeper(store, clock, "101", Wanted(least=1, most=1, count=1, keep_up=True, notice_s=120.0))

    def near_its_end(self, slurm, *jobs: str) -> None:
        queue(slurm, "101", *jobs, time_left={"101": "3:00"})

    def test_the_successor_has_the_jobs_script_and_the_job_drains_once_it_answers(self, kept, engines, store, slurm):
        kept.step()
        assert len(slurm.scripts) == 1
        submit(slurm=SlurmOptions(partition="other"))  # job 102
        self.near_its_end(slurm, "102")
        kept.step()
        mine, other, successor = slurm.scripts
        assert successor == mine != other
        self.near_its_end(slurm, "102", "103_0")
        (old,) = (status for status in read_status(store, SERVICE).replicas if status.job_id == "101")
        assert (old.successor_job_id, old.successor) == ("103_0", "103_0 starting")
        start(engines, "102")
        store.write(make_record(service=SERVICE, model=MODEL, job_id="103_0"))  # nobody listens at its port
        kept.step()
        assert asked_to_drain(store, "101") is None
        start(engines, "103_0")
        kept.step()
        request = asked_to_drain(store, "101")
        assert (request.by, request.cause) == ("hpc-serve: job 103_0 has taken over", "handover")
        assert 100 < request.deadline_s <= 160
        assert [action for action, cause in told(store) if cause == "handover"] == ["submit", "drain"]

    def test_an_empty_drain_file_is_an_order_to_drain_and_a_successor_follows(self, kept, store, slurm):
        """The disk was full when Slurm gave its notice."""
        kept.step()
        drain_file(store, SERVICE, "101-r0-0.json").touch(mode=0o600)
        assert asked_to_drain(store, "101").cause == "unknown"
        kept.step()
        assert len(slurm.scripts) == 2

    def test_a_service_that_is_stopped_gets_no_successor(self, kept, store, slurm):
        kept.step()
        want_stop_of(store, read_status(store, SERVICE).replicas)
        self.near_its_end(slurm)
        kept.step()
        assert len(slurm.scripts) == 1


class TestSleep:
    def fall_asleep(self, job: Keeper) -> None:
        assert any(look(job) is None for _ in range(400))

    def test_the_last_drains_and_is_woken_by_one_of_ten(self, job, store, slurm, stubs, ran):
        self.fall_asleep(job)
        assert asked_to_drain(store, "101").by == "hpc-serve: no request for 2 min"
        assert (wanted(store).state, wanted(store).count) == ("asleep", 0)
        stubs.publish(stubs.engines[0], job_id="101", model=MODEL, state="stopped", reason="no request")
        slurm.job("101", "COMPLETED")
        queue(slurm)
        assert "no request for 2 min. Wake it: hpc-serve wake 8b" in ran(["status", SERVICE]).out
        with pytest.raises(ServiceAsleepError, match=r"8b is asleep since .* Wake it: hpc-serve wake 8b"):
            wait(store, SERVICE)
        woken = at_once(*[partial(wake, store, SERVICE)] * 10)
        assert [len(one.jobs) for one in woken if one.jobs] == [1]
        assert slurm.scripts[1:] == slurm.scripts[:1]
        assert wanted(store).state == "awake"
        assert all(one.note for one in woken if not one.jobs)

    def test_a_wake_that_sbatch_refuses_leaves_it_asleep(self, job, store, slurm, stubs):
        self.fall_asleep(job)
        slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
        with pytest.raises(SubmissionRefusedError):
            wake(store, SERVICE)
        assert (wanted(store).state, wanted(store).submitting) == ("asleep", 0)

    def test_the_script_finds_what_it_found_the_first_time(self, job, store, slurm, stubs, tmp_path, monkeypatch):
        noted = tmp_path / "told"
        before_sbatch(slurm, f"(pwd; env) > {noted}")
        first = wanted(store)
        self.fall_asleep(job)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HPC_SERVE_ENV")
        woken = wake(store, SERVICE)  # the old replica says ready, and was asked to drain: it does not count
        assert [one.job_id for one in woken.jobs] == ["102_0"]
        where, *variables = noted.read_text().splitlines()
        assert where == first.folder
        assert f"HPC_SERVE_ENV={first.variables['HPC_SERVE_ENV']}" in variables


@pytest.fixture
def ended_early(store, slurm) -> None:
    """The service of job 101, which was cancelled while it waited, or died on the way."""
    submit()
    slurm.job("101", "CANCELLED", nodes="")
    slurm.queue()


class TestPeople:
    @pytest.mark.parametrize("numbers", [(4, 3), (1, 3)])
    def test_two_scales_at_once_give_one_of_their_numbers(self, store, slurm, stubs, numbers):
        start(stubs, "102")
        submit()
        queue(slurm, "101", "102")
        before_sbatch(slurm, "sleep 0.5")
        for job_id in ("101", "102", *(f"{array}_{task}" for array in (103, 104) for task in range(3))):
            slurm.job(job_id, "CANCELLED", after_cancel=True)
        at_once(*(partial(scale, store, SERVICE, number, drain_s=0) for number in numbers))
        live = [one for one in read_status(store, SERVICE).replicas if not one.is_over]
        assert len(live) == wanted(store).count
        assert wanted(store).count in numbers

    def test_stop_during_a_wake_ends_what_it_submits(self, store, slurm, ended_early):
        slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
        before_sbatch(slurm, "sleep 2")

        def stop() -> int:
            while not wanted(store).submitting:
                time.sleep(0.01)
            return run_command(["stop", SERVICE])

        _, code = at_once(lambda: wake(store, SERVICE), stop)
        assert code == 0
        assert "102_0" in slurm.cancelled
        assert wanted(store).state == "stopped"

    def test_two_submits_with_once_give_one_job_and_a_third_none(self, store, slurm, ran):
        before_sbatch(slurm, "sleep 0.5")
        once = partial(submit, once=True, replicas=2)
        done = at_once(once, once)
        assert sorted(one.is_there for one in done) == [False, True]
        assert "8b: is there already, as job 101_0" in ran(["submit", "8b", "--once"]).out
        assert len(slurm.scripts) == 1
        assert wanted(store).count == 2

    def test_stop_on_a_full_disk(self, store, slurm, stubs, monkeypatch, capsys):
        def full(*_):
            raise StoreError("cannot write: no space is left on the device.")

        monkeypatch.setattr("hpc_serve.submit.services.stop.ask_to_drain", full)
        monkeypatch.setattr("hpc_serve.rendezvous.claims.write_json", full)
        slurm.job("101", "CANCELLED", after_cancel=True)
        stubs.engines[0].kill()
        stubs.publish(stubs.engines[0], job_id="101", model=MODEL, state="draining")
        assert run_command(["stop", SERVICE, "--timeout", "5s"]) == 0
        assert slurm.cancelled == ["101"]
        assert "no space is left on the device. The jobs are ended all the same." in capsys.readouterr().err

    def test_scale_to_bounds(self, store, stubs, ran):
        assert ran(["scale", SERVICE, "2:6"]).out == "8b: its jobs decide on 2 to 6 replicas from now on.\n"
        assert (wanted(store).least, wanted(store).most) == (2, 6)
        assert "3:2: the least, 3, is more than the most, 2. Write 2:3." in ran(["scale", SERVICE, "3:2"], 2).err

    def test_bounds_of_a_service_that_is_stopped_start_nothing_and_say_so(self, store, stubs, ran):
        change_wanted(store, SERVICE, lambda found: replace(found, state="stopped", count=0))
        out = "8b: its jobs decide on 2 to 6 replicas from now on. It is stopped; `hpc-serve wake 8b` starts it.\n"
        assert ran(["scale", SERVICE, "2:6"]).out == out

    def test_a_service_that_is_stopped_while_it_is_scaled_is_not_said_to_have_replicas(
        self, store, slurm, stubs, monkeypatch
    ):
        def stopped_meanwhile(*words, **options):
            change_wanted(store, SERVICE, lambda found: replace(found, state="stopped", count=0))
            return settle(*words, **options)

        monkeypatch.setattr("hpc_serve.submit.services.want.settle", stopped_meanwhile)
        with pytest.raises(HpcServeError, match=r"8b was stopped by another command meanwhile: `hpc-serve wake 8b`"):
            scale(store, SERVICE, 3)
        assert not slurm.sbatch_words[1:]

    def test_scale_to_a_number_fixes_it(self, store, slurm, stubs):
        assert len(scale(store, SERVICE, 3).added) == 2
        assert (wanted(store).least, wanted(store).most, wanted(store).count) == (3, 3, 3)

    def test_bounds_are_for_services_whose_jobs_decide(self, store, slurm, ran):
        submit(service="plain")
        assert "was submitted without --replicas MIN:MAX or --idle-stop" in ran(["scale", "plain", "1:4"], 2).err

    def test_waking_what_is_awake(self, store, slurm, stubs, ran):
        assert ran(["wake", SERVICE]).out == "8b needs no waking: job 101 is ready.\n"
        assert len(slurm.scripts) == 1

    def test_waking_what_is_over(self, store, ended_early, ran):
        assert ran(["wake", SERVICE]).out == "8b: submitted as job 102_0\n8b is woken; hpc-serve wait 8b\n"
        assert [job.end and job.end.state for job in store.read_submitted(SERVICE)] == ["stopped", None]

    def test_waking_what_never_was(self, store, slurm):
        with pytest.raises(ServiceNotFoundError, match="No service or job 'nobody'"):
            wake(store, "nobody")

    def test_status_says_what_was_decided(self, job, store, stubs, ran):
        go_on(job, 10)
        line = "8b: 1 of 1 to 4 replicas; 1 wanted now; none after 2 min without a request\n"
        assert line in ran(["status", SERVICE]).out
        one = Decision(action="submit", cause="load", why="12 requests waited for 20 s", count=1)
        change_wanted(store, SERVICE, lambda found: found.with_decisions(time.time() - 180, one))
        assert "  3 min ago submitted 1: 12 requests waited for 20 s\n" in ran(["status", SERVICE]).out
        found = json.loads(ran(["status", "--json"]).out)["wanted"][SERVICE]
        assert (found["state"], found["least"], found["most"], found["count"]) == ("awake", 1, 4, 1)
        assert (found["decider"], found["decided"][-1]["cause"]) == ("101-r0-0.json", "load")


class TestRequest:
    def test_misspelt(self, ran):
        said = ran(["render", "8b", "--replicas", "many"], 2).err
        assert "'many' is no number of replicas: write 4, or 1:4 for one to four." in said
        assert "'5' has no unit: write 5m for minutes, or 5h, 5s." in ran(["render", "8b", "--idle-stop", "5"], 2).err

    def test_a_number_is_so_many_more_and_bounds_are_of_the_service(self, store, slurm, ran):
        for words, said in (
            (("2", "--idle-stop", "30m"), "2 of them, none after 30 min without a request\n"),
            (("1", "--idle-stop", "30m"), "3 of them, none after 30 min without a request\n"),
            (("1:4",), "1 to 4, more while requests wait, none after 30 min"),
        ):
            assert f"\n  replicas {said}" in ran(["submit", "8b", "--replicas", *words]).out
        assert len(slurm.scripts) == 2

    @pytest.mark.parametrize(
        ("name", "text", "says"),
        [("HPC_SERVE_ADD_AFTER_S", "soon", "must be a number"), ("HPC_SERVE_PREFLIGHT", "0", "must be on, warn")],
    )
    def test_variables_that_the_job_could_not_read(self, store, slurm, monkeypatch, name, text, says):
        monkeypatch.setenv(name, text)
        with pytest.raises(InvalidRequestError, match=f"{name}={text}: it {says}"):
            submit(replicas=1, max_replicas=4)
        assert slurm.scripts == []


class TestProgram:
    def test_it_is_started_once_for_all_options(self, ran):
        options = ["--replicas", "2:4", "--idle-stop", "30m", "--keep-up", "--signal", "B:USR1@300"]
        said = ran(["render", "8b", *options])
        text = said.out
        assert "given to sbatch by hand, it gets no successors" in said.err
        words = "--service 8b --keep-up --notice-s 300 --replicas 2:4 --idle-stop-s 1800 &\n"
        assert f"python -m hpc_serve.submit.services.service_keeper {words}" in text
        assert "hpc-serve render --model 8b --replicas 2:4 --idle-stop 1800s --gpu h100-80gb --keep-up " in text
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        assert "keeper" not in script(slurm=SlurmOptions(signal="B:USR1@300"))

    @pytest.mark.parametrize("code", [0, 3])
    def test_its_end_does_not_change_the_scripts_exit_code(self, code):
        text = script(keep_up=True)
        found = re.search(r"^ *\[\[ -n \$keeper \]\] \|\| \{\n.*?^ *\}\n", text, re.MULTILINE | re.DOTALL)
        assert found
        start = re.sub("python .*&", "sleep 300 &", found.group())
        assert "sleep 300 &" in start
        around = f"set -euo pipefail\nkeeper=''\ntrap true TERM INT USR1\n{start}exit {code}\n"
        bash = ["env", "--default-signal=HUP", "bash", "-c"]  # the tests may run under nohup
        for _ in range(100):  # a signal that came between fork and exec was lost once in a hundred
            assert subprocess.run([*bash, around], timeout=60, check=False).returncode == code

    def test_it_keeps_its_pid_until_the_script_ends_it(self, job, store, stubs):
        path = drain_file(store, SERVICE, "101-r0-0.json")
        ask_to_drain(path, DrainRequest(by="Slurm", deadline_s=10))
        ending = threading.Event()
        program = threading.Thread(target=run, args=(job, ending.wait), daemon=True)
        program.start()
        program.join(1.0)
        assert program.is_alive()
        ending.set()
        program.join(60)
        assert not program.is_alive()

    def test_a_successor_gets_the_environment_of_the_submission(self, slurm):
        of_script = {"SLURM_JOB_ID": "101", "PATH": str(slurm.bin), "HPC_SERVE_MODEL": "m"}
        ours = of_script | {"HPC_SERVE_JOB_DIR": "/run", "VIRTUAL_ENV": "/env", "PATH": f"/env/bin:{slurm.bin}"}
        assert submission_environ(ours, of_script | {"CUDA_VISIBLE_DEVICES": "0,1"}) == of_script
        assert submission_environ(ours, of_script | {"PATH": "/nowhere"})["PATH"] == f"/env/bin:{slurm.bin}"

    def test_as_a_script_starts_it(self, stubs, slurm, store, tmp_path):
        """It submits from the folder and with the environment of the submission, and ends when its script does."""
        change(store, count=2, least=2)
        noted = tmp_path / "sbatch-environment"
        before_sbatch(slurm, f"(pwd; env) > {noted}")
        (tmp_path / "script.sh").write_text(
            f"""export PATH=/added:$PATH VIRTUAL_ENV=/added HPC_SERVE_JOB_ID=101 HPC_SERVE_JOB_DIR=/run
{sys.executable} -m hpc_serve.submit.services.service_keeper --service 8b --replicas 2:2 &
until [[ -e {store.service_dir(SERVICE)}/submitted/102_0.json ]]; do sleep 0.1; done
kill -HUP $!
wait $!
"""
        )
        folder = tmp_path / "submitted-here"
        folder.mkdir()
        own = {"SLURM_JOB_ID": "101", "SLURM_SUBMIT_DIR": str(folder), "HPC_SERVE_MODEL": "mine"}
        environ = os.environ | own | {"CUDA_VISIBLE_DEVICES": "3"}
        done = subprocess.run(
            ["bash", "script.sh"], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "submitted 1: there was 1 replica, of 2 that are wanted" in done.stderr
        where, *variables = noted.read_text().splitlines()
        assert where == str(folder)
        assert {"HPC_SERVE_MODEL=mine", f"PATH={os.environ['PATH']}"} <= set(variables)
        unwanted = ("VIRTUAL_ENV=", "HPC_SERVE_JOB_", "CUDA_VISIBLE_DEVICES=", "SLURM_JOB_ID=", "SLURM_SUBMIT_DIR=")
        assert [line for line in variables if line.startswith(unwanted)] == []

    def test_a_job_that_was_suspended_is_kept_on(self, store):
        code = """
from hpc_serve.submit.services import service_keeper
service_keeper.Keeper.step = lambda keeper: print("step", flush=True) or 0.3
service_keeper.main(["--service", "8b"])
"""
        environ = os.environ | {"HPC_SERVE_JOB_ID": "101"}
        keeper = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
        with keeper:
            for _ in range(3):
                assert keeper.stdout.readline() == "step\n"
                keeper.send_signal(signal.SIGSTOP)
                time.sleep(0.6)  # longer than it waits
                keeper.send_signal(signal.SIGCONT)
            assert [keeper.stdout.readline() for _ in range(3)] == 3 * ["step\n"]
            keeper.send_signal(signal.SIGHUP)
        assert keeper.returncode == 0

    def test_while_it_waits_it_has_loaded_neither_plans_nor_submitit(self):
        code = """
import sys
import hpc_serve.submit.services.service_keeper
print([name for name in ("hpc_serve.plan", "submitit", "jinja2", "openai", "click", "yaml") if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"
