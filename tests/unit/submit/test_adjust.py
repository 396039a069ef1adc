"""The jobs that decide how many replicas there are: one at a time, what they do, and what a wake does; stub engines."""

from __future__ import annotations

import contextlib
import io
import json
import ssl
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hpc_serve.cli.main import run as run_command
from hpc_serve.errors import InvalidRequestError, ServiceAsleepError, ServiceNotFoundError, SubmissionRefusedError
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file, read_drain_request
from hpc_serve.rendezvous.elastic import SUBMITTING_S, Elastic, change_elastic, read_elastic
from hpc_serve.submit.request.environment import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services import services
from hpc_serve.submit.services.adjust import Adjuster
from hpc_serve.submit.services.elastic import ReplicaBounds, Windows
from hpc_serve.submit.services.live_replicas import live_replicas
from hpc_serve.submit.services.scale import scale
from hpc_serve.submit.services.service_bounds import note_stop_of
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.services.wake import wake
from hpc_serve.submit.status.status_reader import read_status
from tests.support.stubs import StubService

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SERVICE = "8b"


class Clock:
    """A monotonic clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stubs(store, slurm):
    """The service of job 101, submitted with --replicas 1:4 --idle-stop 2m; its engine works on two at once."""
    services.submit(ServeRequest(model="8b", service=SERVICE, replicas=1, max_replicas=4, idle_stop_s=120.0))
    found = StubService(store.home, SERVICE)
    start(found, "101")
    queue(slurm, "101")
    yield found
    found.close()


def start(stubs: StubService, job_id: str):
    return stubs.start("--stub-slots", "2", "--stub-first-s", "600", job_id=job_id, model=MODEL)


def queue(slurm, *running: str, pending: tuple[str, ...] = ()) -> None:
    jobs = [(job_id, "RUNNING", "None") for job_id in running] + [(job_id, "PENDING", "Priority") for job_id in pending]
    slurm.queue(*jobs, name=f"hpc-serve-{SERVICE}")


@pytest.fixture
def job(store, stubs, clock):
    """What job 101 does."""
    return adjuster(store, clock, "101")


def adjuster(store, clock, job_id: str) -> Adjuster:
    bounds = ReplicaBounds(least=1, most=4, idle_stop_s=120.0)
    windows = Windows(add_after_s=20.0, leave_after_s=60.0)
    one = Adjuster(store=store, service=SERVICE, job_id=job_id, restart=0, bounds=bounds, windows=windows, clock=clock)
    one._slurm._max_age_s = 0.0
    return one


def go_on(one: Adjuster, for_s: float) -> None:
    """Let so much time pass, a look each five seconds."""
    for _ in range(int(for_s / 5)):
        look(one)


def look(one: Adjuster) -> float | None:
    clock = one.clock
    assert isinstance(clock, Clock)
    clock.now_s += 5.0
    return one.step(time.time())


def decides(store) -> str:
    return read_elastic(store, SERVICE).decider


def asked_to_drain(store, job_id: str) -> str | None:
    request = read_drain_request(drain_file(store, SERVICE, job_id=job_id, restart=0, replica=0))
    return request.by if request is not None else None


def requests(stubs: StubService, count: int) -> None:
    """So many requests to the first engine, which do not end."""
    key = stubs.key_file.read_text().strip()
    body = json.dumps({"model": "405b", "prompt": "x", "max_tokens": 3}).encode()
    url = f"https://127.0.0.1:{stubs.engines[0].port}/v1/completions"
    context = ssl._create_unverified_context()

    def ask() -> None:
        asked = urllib.request.Request(
            url, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        )
        with contextlib.suppress(OSError):
            urllib.request.urlopen(asked, context=context, timeout=600)

    for _ in range(count):
        threading.Thread(target=ask, daemon=True).start()


def until_they_wait(job: Adjuster, count: int) -> None:
    """Until the engine says that so many of its requests wait."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        report = job._read_status()
        load = next(iter(job._look(live_replicas(job.store, report.replicas), report).loads.values()))
        if load is not None and load.waiting == count:
            return
    raise AssertionError("the requests did not wait")


class TestWhoDecides:
    def test_the_first_that_is_ready(self, job, store):
        job.step(time.time())
        assert decides(store) == "101-r0-0.json"

    def test_of_two_at_once_one(self, store, slurm, stubs, clock):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        pair = [adjuster(store, clock, "101"), adjuster(store, clock, "102_0")]
        barrier = threading.Barrier(2)

        def step(one: Adjuster) -> None:
            barrier.wait()
            one.step(time.time())

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(step, pair))
        assert sorted(one._judge is not None for one in pair) == [False, True]

    def test_one_that_died_is_replaced_after_the_lease(self, job, store, slurm, stubs, clock):
        job.step(time.time())
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        other = adjuster(store, clock, "102_0")
        go_on(other, 30)
        assert decides(store) == "101-r0-0.json"
        go_on(other, 5)
        assert decides(store) == "102_0-r0-0.json"
        job.step(time.time())  # it was frozen, and sees that
        assert job._judge is None
        assert decides(store) == "102_0-r0-0.json"

    def test_one_that_is_at_it_is_not_replaced(self, job, store, slurm, stubs, clock):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        other = adjuster(store, clock, "102_0")
        for _ in range(20):
            go_on(job, 5)
            other.step(time.time())
        assert decides(store) == "101-r0-0.json"

    def test_one_that_drains_lets_another_decide_at_once(self, job, store, stubs):
        job.step(time.time())
        path = drain_file(store, SERVICE, job_id="101", restart=0, replica=0)
        ask_to_drain(path, DrainRequest(by="Slurm, before the time limit", deadline_s=10))
        assert job.step(time.time()) is None
        assert decides(store) == ""

    def test_one_that_starts_does_not_decide(self, store, slurm, stubs, clock):
        stubs.publish(stubs.engines[0], job_id="101", model=MODEL, state="starting")
        adjuster(store, clock, "101").step(time.time())
        assert decides(store) == ""

    def test_the_bounds_of_a_script_where_nothing_is_written(self, job, store):
        (store.service_dir(SERVICE) / "elastic.json").unlink()
        job.step(time.time())
        found = read_elastic(store, SERVICE)
        assert (found.least, found.most, found.idle_stop_s, found.decider) == (1, 4, 120.0, "101-r0-0.json")


class TestAdding:
    def test_requests_that_wait_bring_more(self, job, store, slurm, stubs):
        requests(stubs, 7)
        until_they_wait(job, 5)
        go_on(job, 25)
        assert len(slurm.scripts) == 1
        go_on(job, 10)
        assert slurm.scripts[1] == slurm.scripts[0]
        assert "--array=0-2" in slurm.sbatch_words[-1]
        found = read_elastic(store, SERVICE)
        assert found.starting == ("102_0", "102_1", "102_2")
        assert found.submitting == 0
        assert found.decided[-1].text == "added 3: 5 requests waited for 20 s"
        go_on(job, 60)  # nothing more while they come
        assert len(slurm.scripts) == 2

    def test_one_that_fails_makes_the_next_wait(self, job, store, slurm, stubs, monkeypatch):
        requests(stubs, 3)
        until_they_wait(job, 1)
        go_on(job, 40)
        assert read_elastic(store, SERVICE).starting == ("102_0",)
        slurm.job("102_0", "FAILED", exit_code="1:0")
        queue(slurm, "101")
        before = time.time()
        go_on(job, 5)
        found = read_elastic(store, SERVICE)
        assert (found.failures, found.starting) == (1, ())
        assert found.problem.startswith("job 102_0, which was added, failed: ")
        assert before + 30 <= found.next_try_at <= time.time() + 30
        change_elastic(store, SERVICE, lambda one: replace(one, next_try_at=one.next_try_at + 600))  # a slow machine
        go_on(job, 40)
        assert len(slurm.scripts) == 2
        assert "; trying again at " in status_line(store)
        change_elastic(store, SERVICE, lambda one: replace(one, next_try_at=time.time()))
        go_on(job, 40)
        assert len(slurm.scripts) == 3

    def test_sbatch_that_refuses(self, job, store, slurm, stubs):
        slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
        requests(stubs, 3)
        until_they_wait(job, 1)
        go_on(job, 40)
        found = read_elastic(store, SERVICE)
        assert found.submitting == 0
        assert found.failures == 1
        assert found.problem.startswith(
            "one could not be added: sbatch refused the job: Batch job submission failed: Access"
        )

    def test_while_another_submits_none_is_added(self, job, store, slurm, stubs):
        go_on(job, 5)
        change_elastic(store, SERVICE, lambda one: replace(one, submitting=1, submitting_at=time.time()))
        requests(stubs, 3)
        until_they_wait(job, 1)
        go_on(job, 40)
        assert len(slurm.scripts) == 1
        change_elastic(store, SERVICE, lambda one: replace(one, submitting_at=time.time() - SUBMITTING_S))
        go_on(job, 30)
        assert len(slurm.scripts) == 2

    def test_a_controller_that_is_away_changes_nothing(self, job, slurm, stubs):
        requests(stubs, 3)
        until_they_wait(job, 1)
        slurm.be_silent()
        go_on(job, 40)
        assert len(slurm.scripts) == 1


class TestLeaving:
    def test_one_that_is_not_needed_drains_and_no_successor_takes_over(self, job, store, slurm, stubs):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        go_on(job, 60)
        assert asked_to_drain(store, "102_0") is None
        go_on(job, 15)
        by = asked_to_drain(store, "102_0")
        assert by == "hpc-serve elastic: the other could have carried the load for 60 s: no request"
        assert asked_to_drain(store, "101") is None
        go_on(job, 30)
        assert read_elastic(store, SERVICE).state == "awake"

    def test_one_that_waits_in_the_queue_is_cancelled(self, job, store, slurm, stubs):
        services.add_replicas(store, SERVICE, 1)
        queue(slurm, "101", pending=("102_0",))
        slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
        go_on(job, 75)
        assert slurm.cancelled == ["102_0"]
        assert asked_to_drain(store, "101") is None

    def test_an_addition_that_is_cancelled_as_too_many_has_not_failed(self, job, store, slurm, stubs):
        requests(stubs, 3)
        until_they_wait(job, 1)
        go_on(job, 40)
        assert read_elastic(store, SERVICE).starting == ("102_0",)
        slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
        assert run_command(["scale", SERVICE, "1:1"]) == 0
        go_on(job, 15)
        assert slurm.cancelled == ["102_0"]
        found = read_elastic(store, SERVICE)
        assert (found.starting, found.failures, found.problem) == ((), 0, "")
        assert found.decided[-1].text == "cancelled job 102_0: there were 2, of at most 1"
        assert "trying again" not in status_line(store)


class TestSleep:
    def fall_asleep(self, job: Adjuster) -> None:
        for _ in range(400):
            if look(job) is None:
                return
        raise AssertionError("it did not fall asleep")

    def test_the_last_drains_and_is_woken_by_one_of_ten(self, job, store, slurm, stubs):
        stubs.publish(stubs.engines[0], job_id="101", model=MODEL)
        self.fall_asleep(job)
        assert asked_to_drain(store, "101") == "hpc-serve elastic: no request for 2 min"
        assert read_elastic(store, SERVICE).state == "asleep"
        stubs.publish(
            stubs.engines[0], job_id="101", model=MODEL, state="stopped", reason="hpc-serve elastic: no request"
        )
        slurm.job("101", "COMPLETED")
        queue(slurm)
        assert "8b is asleep since " in status_line(store)
        assert "no request for 2 min. Wake it: hpc-serve wake 8b" in status_line(store)
        with pytest.raises(ServiceAsleepError, match=r"8b is asleep since .* Wake it: hpc-serve wake 8b"):
            wait(store, SERVICE)
        barrier = threading.Barrier(10)

        def wake_it(_: int):
            barrier.wait()
            return wake(store, SERVICE)

        with ThreadPoolExecutor(10) as pool:
            woken = list(pool.map(wake_it, range(10)))
        assert [len(one.jobs) for one in woken if one.jobs] == [1]
        assert len(slurm.scripts) == 2
        assert slurm.scripts[1] == slurm.scripts[0]
        assert read_elastic(store, SERVICE).state == "awake"
        assert all(one.note for one in woken if not one.jobs)

    def test_others_fall_asleep_with_it(self, job, store, slurm, stubs, clock):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0", pending=("103_0",))
        other = adjuster(store, clock, "102_0")
        change_elastic(store, SERVICE, lambda one: replace(one, least=3))
        slurm.job("103_0", "CANCELLED", after_cancel=True, nodes="")
        self.fall_asleep(job)
        assert slurm.cancelled == ["103_0"]
        assert other.step(time.time()) == 0.0
        assert other.step(time.time()) is None
        assert asked_to_drain(store, "102_0") == "hpc-serve elastic: no request for 2 min"

    def test_woken_while_it_drains(self, job, store, slurm, stubs):
        """The old replica says ready, and was asked to drain: it does not count."""
        self.fall_asleep(job)
        assert [one.job_id for one in wake(store, SERVICE).jobs] == ["102_0"]

    def test_woken_before_a_replica_saw_that_it_is_asleep(self, job, store, slurm, stubs):
        change_elastic(store, SERVICE, lambda one: replace(one, state="asleep"))
        assert wake(store, SERVICE).note == "job 101 is ready"
        go_on(job, 10)
        assert asked_to_drain(store, "101") is None

    def test_a_wake_that_sbatch_refuses_leaves_it_asleep(self, job, store, slurm, stubs):
        self.fall_asleep(job)
        slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
        with pytest.raises(SubmissionRefusedError):
            wake(store, SERVICE)
        found = read_elastic(store, SERVICE)
        assert (found.state, found.submitting) == ("asleep", 0)

    def test_the_script_finds_what_it_found_the_first_time(self, job, store, slurm, stubs, tmp_path, monkeypatch):
        told = tmp_path / "told"
        sbatch = slurm.bin / "sbatch"
        sbatch.write_text(sbatch.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n(pwd; env) > {told}\n"))
        first = read_elastic(store, SERVICE)
        self.fall_asleep(job)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("HPC_SERVE_ENV")
        wake(store, SERVICE)
        where, *variables = told.read_text().splitlines()
        assert where == first.folder
        assert f"HPC_SERVE_ENV={first.variables['HPC_SERVE_ENV']}" in variables


class TestPeople:
    def test_a_service_that_is_stopped_stays_stopped(self, job, store, slurm, stubs):
        job.step(time.time())
        note_stop_of(store, read_status(store, SERVICE).replicas)
        assert read_elastic(store, SERVICE).state == "stopped"
        requests(stubs, 3)
        go_on(job, 40)
        assert len(slurm.scripts) == 1
        assert read_elastic(store, SERVICE).decider == ""

    def test_a_part_of_it_that_is_stopped_is_not_the_service(self, store, slurm, stubs):
        start(stubs, "102_0")
        queue(slurm, "101", "102_0")
        note_stop_of(store, [one for one in read_status(store, SERVICE).replicas if one.job_id == "101"])
        assert read_elastic(store, SERVICE).state == "awake"

    def test_scale_to_bounds(self, store, stubs, capsys):
        assert run_command(["scale", SERVICE, "2:6"]) == 0
        assert capsys.readouterr().out == "8b: its jobs decide on 2 to 6 replicas from now on.\n"
        found = read_elastic(store, SERVICE)
        assert (found.least, found.most) == (2, 6)
        assert run_command(["scale", SERVICE, "3:2"]) == 2
        assert "replicas is 3:2: the least, 3, is more than the most, 2. Write 2:3." in capsys.readouterr().err

    def test_scale_to_a_number_fixes_it(self, store, slurm, stubs):
        assert len(scale(store, SERVICE, 3).added) == 2
        found = read_elastic(store, SERVICE)
        assert (found.least, found.most) == (3, 3)

    def test_bounds_are_for_services_whose_jobs_decide(self, store, slurm, capsys):
        services.submit(ServeRequest(model="8b", service="plain"))
        assert run_command(["scale", "plain", "1:4"]) == 2
        assert "was submitted without --replicas MIN:MAX or --idle-stop" in capsys.readouterr().err

    def test_waking_what_is_awake(self, store, slurm, stubs, capsys):
        assert run_command(["wake", SERVICE]) == 0
        assert capsys.readouterr().out == "8b needs no waking: job 101 is ready.\n"
        assert len(slurm.scripts) == 1

    def test_waking_what_is_over(self, store, slurm, capsys):
        services.submit(ServeRequest(model="8b", service="plain"))
        slurm.job("101", "TIMEOUT")
        slurm.queue()
        assert run_command(["wake", "plain"]) == 0
        assert capsys.readouterr().out == "plain: submitted as job 102_0\nplain is woken; hpc-serve wait plain\n"

    def test_waking_what_never_was(self, store, slurm):
        with pytest.raises(ServiceNotFoundError, match="No service or job 'nobody'"):
            wake(store, "nobody")

    def test_a_new_submission_wakes_it(self, store, slurm, stubs):
        change_elastic(store, SERVICE, lambda one: replace(one, state="asleep"))
        services.submit(ServeRequest(model="8b", service=SERVICE))
        assert read_elastic(store, SERVICE).state == "awake"

    def test_status_says_what_was_decided(self, job, store, stubs, capsys):
        go_on(job, 10)
        assert status_line(store) == "8b: 1 of 1 to 4 replicas; none after 2 min without a request"
        change_elastic(
            store, SERVICE, lambda one: one.with_decision(time.time() - 180, "added one: 12 requests waited")
        )
        assert status_line(store).endswith("; 3 min ago: added one: 12 requests waited")
        capsys.readouterr()
        assert run_command(["status", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["elastic"][SERVICE]
        assert (told["state"], told["least"], told["most"], told["decider"]) == ("awake", 1, 4, "101-r0-0.json")


def status_line(store) -> str:
    """The line that `status` prints of it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_command(["status", SERVICE]) == 0
    return next(
        line for line in said.getvalue().splitlines() if line.startswith((f"{SERVICE}: 1 of", f"{SERVICE} is asleep"))
    )


class TestRequest:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"replicas": 4, "max_replicas": 1}, "replicas is 4:1: the least, 4, is more than the most, 1"),
            ({"replicas": 0, "max_replicas": 3}, r"replicas is 0:3: at least 1 stays.*--idle-stop 30m"),
            ({"idle_stop_s": 0.0}, "idle-stop is 0 s: it must be more than 0"),
            ({"max_replicas": 4, "cluster": "local"}, "--replicas MIN:MAX is for jobs of Slurm"),
            ({"idle_stop_s": 60.0, "cluster": "local"}, "--idle-stop is for jobs of Slurm"),
        ],
    )
    def test_refused(self, fields, said):
        with pytest.raises(InvalidRequestError, match=said):
            ServeRequest(model="8b", service=SERVICE, **fields)

    @pytest.mark.parametrize("fields", [{"max_replicas": 4}, {"idle_stop_s": 60.0}])
    def test_refused_in_a_container(self, fields):
        image = Environment(kind="apptainer", path="/images/vllm.sif")
        with pytest.raises(InvalidRequestError, match=r"image /images/vllm\.sif.*hpc-serve scale"):
            ServeRequest(model="8b", service=SERVICE, environment=image, **fields)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--replicas", "many"], "'many' is no number of replicas: write 4, or 1:4 for one to four."),
            (["--idle-stop", "5"], "'5' has no unit: write 5m for minutes, or 5h, 5s."),
        ],
    )
    def test_misspelt(self, words, said, capsys):
        assert run_command(["render", "8b", *words]) == 2
        assert said in capsys.readouterr().err

    def test_the_script_starts_the_program(self, capsys):
        assert run_command(["render", "8b", "--replicas", "2:4", "--idle-stop", "30m", "--keep-up"]) == 0
        text = capsys.readouterr().out
        words = "--service 8b --keep-up --notice-s 120 --replicas 2:4 --idle-stop-s 1800 &\n"
        assert f"python -m hpc_serve.submit.services.service_keeper {words}" in text
        assert "#SBATCH --array=0-1\n" in text
        assert "hpc-serve render --model 8b --replicas 2:4 --idle-stop 1800s --gpu h100-80gb --keep-up " in text

    def test_an_idle_stop_of_a_fixed_number(self, store, slurm):
        services.submit(ServeRequest(model="8b", service=SERVICE, replicas=2, idle_stop_s=60.0))
        found = read_elastic(store, SERVICE)
        assert (found.least, found.most, found.idle_stop_s) == (2, 2, 60.0)
        assert "--replicas 2:2 --idle-stop-s 60 &" in slurm.scripts[0]

    def test_a_number_is_so_many_more_and_bounds_are_of_the_service(self, store, slurm, capsys):
        assert run_command(["submit", "8b", "--replicas", "2", "--idle-stop", "30m"]) == 0
        assert "\n  replicas 2 of them, none after 30 min without a request\n" in capsys.readouterr().out
        assert run_command(["submit", "8b", "--replicas", "1", "--idle-stop", "30m"]) == 0
        assert "\n  replicas 3 of them, none after 30 min without a request\n" in capsys.readouterr().out
        assert run_command(["submit", "8b", "--replicas", "1:4"]) == 0
        assert "\n  replicas 1 to 4, more while requests wait\n" in capsys.readouterr().out

    def test_windows_that_the_job_could_not_read(self, store, slurm, monkeypatch):
        monkeypatch.setenv("HPC_SERVE_ADD_AFTER_S", "soon")
        with pytest.raises(
            InvalidRequestError, match="HPC_SERVE_ADD_AFTER_S is 'soon': it must be a number of seconds"
        ):
            services.submit(ServeRequest(model="8b", service=SERVICE, replicas=1, max_replicas=4))
        assert slurm.scripts == []

    def test_what_was_asked_for_is_read_again(self, store, slurm):
        services.submit(ServeRequest(model="8b", service=SERVICE, replicas=1, max_replicas=4))
        assert read_elastic(store, SERVICE) == replace(read_elastic(store, SERVICE), least=1, most=4, state="awake")
        assert isinstance(read_elastic(store, SERVICE), Elastic)
