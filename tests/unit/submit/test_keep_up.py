"""A service that is kept up: when a successor is due, who submits it, and what becomes of it; stand-ins for Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.cli.main import run as run_command
from hpc_serve.errors import InvalidRequestError, SchedulerUnavailableError
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file, read_drain_request
from hpc_serve.rendezvous.successor import (
    Successor,
    read_successor,
    replace_successor,
    successor_file,
    write_successor,
)
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.environment import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.request.sbatch_options import SlurmOptions
from hpc_serve.submit.script.render import render_script
from hpc_serve.submit.services import keep_up, service_keeper, services
from hpc_serve.submit.services.handover import JobTimes, due_at, times_of, was_stopped
from hpc_serve.submit.services.keep_up import KeepUp
from hpc_serve.submit.services.scale import scale
from hpc_serve.submit.services.script_environ import submission_environ
from hpc_serve.submit.services.service_keeper import Ending
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import JobState
from hpc_serve.submit.status.job_status import successor_sentence
from hpc_serve.submit.status.status_reader import read_status
from tests.support.fake_slurm import FakeSlurm
from tests.support.stubs import StubService, make_record

HOUR = 3600.0
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def kept(store, slurm):
    """Job 101 of the service, which has run for 11 of its 12 hours and took 100 s to be ready."""
    services.submit(ServeRequest(model="8b", service="8b", keep_up=True))
    store.write(make_record(service="8b", model=MODEL, job_id="101", measured={"start_s": 100.0}))
    slurm.queue(("101", "RUNNING", "None"), name="hpc-serve-8b")
    began_at = set_time_limit(slurm, ends_in_s=HOUR)
    return KeepUp(store=store, service="8b", job_id="101", restart=0, notice_s=120.0, began_at=began_at + 5)


def set_time_limit(slurm: FakeSlurm, *, ends_in_s: float) -> float:
    """Let job 101 have so much time left; returns when it began."""
    now = time.time()
    began_at = now - 11 * HOUR
    slurm.job_times("101", submitted_at=began_at - 60, started_at=began_at, ends_at=now + ends_in_s)
    return began_at


def file_of(kept: KeepUp) -> Path:
    return successor_file(kept.store, "8b", job_id="101")


def drain_file_of(kept: KeepUp) -> Path:
    return drain_file(kept.store, "8b", job_id="101", restart=0, replica=0)


def late() -> float:
    """A minute before the time limit of `kept`."""
    return time.time() + HOUR - 60


def submit_successor(kept: KeepUp) -> str:
    """Let it submit one; returns its job's id."""
    assert kept.step(late()) == 0
    return read_successor(file_of(kept)).job_id


class TestWhen:
    times = JobTimes(submitted_at=1000.0, began_at=1060.0, ends_at=1060.0 + 12 * HOUR)

    def test_notice_start_wait_and_margin_before_the_end(self):
        due = due_at(self.times, start_s=100.0, notice_s=120.0)
        assert self.times.ends_at - due == pytest.approx(120 + 1.2 * 100 + 60 + 60)

    def test_a_long_wait_in_the_queue_counts_for_half_of_the_limit_at_most(self):
        times = replace(self.times, submitted_at=1060.0 - 100 * HOUR)
        due = due_at(times, start_s=100.0, notice_s=120.0)
        assert times.ends_at - due == pytest.approx(120 + 120 + 6 * HOUR + 60)

    def test_the_clock_of_a_node_that_is_behind(self):
        job = JobState(job_id="1", state="RUNNING", submitted_at=900.0, started_at=1000.0, ended_at=4600.0)
        assert times_of(job, seen_since=1010.0) == JobTimes(submitted_at=900.0, began_at=1000.0, ends_at=4600.0)
        assert times_of(job, seen_since=700.0) == JobTimes(submitted_at=600.0, began_at=700.0, ends_at=4300.0)

    def test_a_job_without_a_time_limit(self):
        assert times_of(JobState(job_id="1", state="RUNNING", started_at=1.0), seen_since=1.0) is None

    @pytest.mark.parametrize(
        ("by", "state", "reason", "stopped"),
        [
            ("hpc-serve stop on login", "ready", None, True),
            ("Slurm, before the time limit or a preemption (USR1)", "draining", "Slurm, before …", False),
            ("Slurm, before the time limit", "draining", "hpc-serve stop on login; no request", True),
            ("hpc-serve keep-up: job 7 has taken over", "draining", "hpc-serve keep-up: job 7", False),
            (None, "stopped", "hpc-serve stop on login; no request was under way", True),
            (None, "failed", "engine exited with 1", False),
            (None, "ready", None, False),
        ],
    )
    def test_who_ended_it(self, by, state, reason, stopped):
        request = DrainRequest(by=by, deadline_s=5) if by else None
        assert was_stopped(request, make_record(state=state, reason=reason)) == stopped


class TestSteps:
    def test_until_it_is_due_it_waits(self, kept, slurm):
        assert kept.step(time.time()) == 60.0
        assert read_successor(file_of(kept)) is None
        assert len(slurm.scripts) == 1

    def test_a_run_that_was_never_ready_has_no_successor(self, kept, slurm, store):
        store.write(make_record(service="8b", model=MODEL, job_id="101", state="starting"))
        assert kept.step(late()) == keep_up._LOOK_S
        assert len(slurm.scripts) == 1

    def test_a_time_limit_that_was_raised(self, kept, slurm):
        assert kept.step(time.time()) == 60.0
        set_time_limit(slurm, ends_in_s=9 * HOUR)
        assert kept.step(late()) == 60.0
        assert read_successor(file_of(kept)) is None

    def test_the_successor_has_this_jobs_script_and_log_folder(self, kept, slurm, store):
        services.submit(ServeRequest(model="8b", service="8b", slurm=SlurmOptions(partition="other")))  # job 102
        assert submit_successor(kept) == "103_0"
        mine, other, successor = slurm.scripts
        assert successor == mine != other
        assert slurm.sbatch_words[-1].startswith(f"--array=0-0 --output={store.log_dir('8b')}/%A_%a.log ")
        assert {job.job_id for job in store.read_submitted("8b")} == {"101", "102", "103_0"}

    def test_one_of_ten_who_try_at_once_submits(self, kept, slurm):
        at = late()
        others = [replace(kept) for _ in range(10)]
        barrier = threading.Barrier(10)

        def step(one: KeepUp) -> float | None:
            barrier.wait()
            return one.step(at)

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(step, others))
        assert len(slurm.scripts) == 2
        assert read_successor(file_of(kept)).job_id == "102_0"
        for one in others:
            assert one.step(at + 1) == keep_up._LOOK_S  # all of them follow the same one
        assert len(slurm.scripts) == 2

    def test_a_claim_whose_owner_died_is_taken_after_a_while(self, kept, slurm):
        at = late()
        write_successor(file_of(kept), Successor(tries=1, claimed_at=at - 100))
        assert kept.step(at) == keep_up._LOOK_S
        assert len(slurm.scripts) == 1
        assert kept.step(at + 100) == 0
        assert read_successor(file_of(kept)) == Successor(job_id="102_0", tries=2, claimed_at=at + 100)

    def test_a_claim_that_others_have_changed_is_not_replaced(self, kept, store):
        path = file_of(kept)
        theirs = Successor(tries=1, claimed_at=1.0)
        assert replace_successor(store, "8b", path, seen=None, by=theirs)
        assert not replace_successor(store, "8b", path, seen=None, by=Successor(tries=1, claimed_at=2.0))
        assert read_successor(path) == theirs

    def test_once_it_has_answered_the_old_run_drains(self, kept, slurm, store):
        at = late()
        assert kept.step(at) == 0
        slurm.queue(("101", "RUNNING", "None"), ("102_0", "RUNNING", "None"))
        stubs = StubService(store.home, "8b")
        try:
            engine = stubs.start(job_id="102_0", model=MODEL, state="starting")
            assert kept.step(at) == keep_up._FOLLOW_S
            assert read_drain_request(drain_file_of(kept)) is None
            stubs.publish(engine, job_id="102_0", model=MODEL)
            slurm.be_silent()  # the controller may be away by now
            assert kept.step(at) is None
        finally:
            stubs.close()
        request = read_drain_request(drain_file_of(kept))
        assert request.by == "hpc-serve keep-up: job 102_0 has taken over"
        assert kept._times is not None
        assert request.deadline_s == pytest.approx(kept._times.ends_at - at - keep_up._WAY_DOWN_S)

    def test_a_record_that_says_ready_is_not_enough(self, kept, store):
        submit_successor(kept)
        store.write(make_record(service="8b", model=MODEL, job_id="102_0"))  # nobody listens at its port
        assert kept.step(late()) == keep_up._FOLLOW_S
        assert read_drain_request(drain_file_of(kept)) is None


class TestFailingSuccessor:
    def test_it_is_tried_again_later_and_later(self, kept, slurm, store):
        at = late()
        for tries, pause in ((1, 30.0), (2, 60.0), (3, 120.0)):
            assert kept.step(at) == 0
            job_id = read_successor(file_of(kept)).job_id
            store.write(
                make_record(
                    service="8b", model=MODEL, job_id=job_id, state="failed", failed_part="engine", reason="no memory"
                )
            )
            slurm.job(job_id, "FAILED", exit_code="1:0")
            slurm.queue(("101", "RUNNING", "None"))
            kept._slurm = SchedulerView()
            assert kept.step(at) == keep_up._FOLLOW_S
            found = read_successor(file_of(kept))
            assert (found.tries, found.problem) == (tries, "failed: no memory")
            assert found.next_try_at == at + pause
            assert kept.step(at + pause - 1) == keep_up._LOOK_S
            at += pause
        assert len(slurm.scripts) == 4
        old = next(one for one in read_status(store, "8b").replicas if one.job_id == "101")
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        assert old.successor == f"{job_id} failed: no memory; trying again at {clock}"
        assert old.successor_job_id == ""

    def test_one_that_slurm_ended_before_it_had_a_record(self, kept, slurm):
        job_id = submit_successor(kept)
        slurm.job(job_id, "CANCELLED", nodes="")
        slurm.queue(("101", "RUNNING", "None"))
        kept.step(late())
        assert "it was cancelled before it began (CANCELLED)" in read_successor(file_of(kept)).problem

    def test_a_controller_that_does_not_answer_is_no_end(self, kept, slurm):
        job_id = submit_successor(kept)
        slurm.be_silent()
        kept._slurm = SchedulerView()
        assert kept.step(late()) == keep_up._LOOK_S
        assert read_successor(file_of(kept)) == replace(read_successor(file_of(kept)), job_id=job_id, problem="")

    def test_sbatch_that_refuses_is_told_and_asked_again(self, kept, slurm, store):
        slurm.refuse("sbatch: error: Batch job submission failed: Access/permission denied")
        at = late()
        assert kept.step(at) == keep_up._FOLLOW_S
        found = read_successor(file_of(kept))
        assert "Access/permission denied" in found.problem
        assert found.next_try_at == at + 30
        (old,) = read_status(store, "8b").replicas
        assert old.successor.startswith("was not submitted: sbatch refused the job: ")

    def test_no_sbatch_on_the_node_is_told_at_once(self, kept, store, monkeypatch):
        monkeypatch.setattr("hpc_serve.submit.services.keep_up.shutil.which", lambda name: None)
        with pytest.raises(SchedulerUnavailableError, match="There is no `sbatch` here"):
            kept.step(time.time())
        (old,) = read_status(store, "8b").replicas
        assert old.successor.startswith("There is no `sbatch` here")

    def test_when_slurm_answers_again_nothing_stands_in_the_way(self, kept, slurm):
        slurm.be_silent()
        with pytest.raises(SchedulerUnavailableError):
            kept.step(time.time())
        assert "not known when job 101 ends" in read_successor(file_of(kept)).problem
        slurm.be_silent(False)
        assert submit_successor(kept) == "102_0"

    def test_a_script_that_was_submitted_by_hand(self, store, slurm):
        now = time.time()
        store.ensure_service("8b")
        store.write(make_record(service="8b", model=MODEL, job_id="101", measured={"start_s": 100.0}))
        slurm.job_times("101", submitted_at=now - 60, started_at=now, ends_at=now + HOUR)
        by_hand = KeepUp(store=store, service="8b", job_id="101", restart=0, notice_s=120.0)
        with pytest.raises(InvalidRequestError, match="no script of `hpc-serve submit` for 101"):
            by_hand.step(late())
        assert read_successor(file_of(by_hand)).problem.startswith("cannot be submitted: There is no script")


class TestStop:
    def stop(self, kept):
        ask_to_drain(drain_file_of(kept), DrainRequest(by="hpc-serve stop on login", deadline_s=60))

    def test_a_run_that_is_stopped_submits_none(self, kept, slurm):
        self.stop(kept)
        assert kept.step(late()) is None
        assert len(slurm.scripts) == 1

    def test_a_successor_that_waits_is_ended_with_it(self, kept, slurm, store):
        job_id = submit_successor(kept)
        slurm.job(job_id, "CANCELLED", after_cancel=True, nodes="")
        self.stop(kept)
        assert kept.step(late()) is None
        assert slurm.cancelled == [job_id]
        assert read_successor(file_of(kept)).problem == "was ended: its predecessor was stopped"

    def test_stopped_while_sbatch_is_at_it(self, kept, slurm, monkeypatch):
        """The request to drain comes after the last look and before there is a job to find."""
        add = services.add_replicas

        def add_slowly(*args, **options):
            self.stop(kept)
            done = add(*args, **options)
            slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
            ending.note(signal.SIGHUP)
            return done

        ending = Ending()
        monkeypatch.setattr(services, "add_replicas", add_slowly)
        set_time_limit(slurm, ends_in_s=300)
        assert service_keeper.run([kept], ending) == 0
        assert slurm.cancelled == ["102_0"]

    @pytest.mark.parametrize(("number", "ended"), [(signal.SIGTERM, ["102_0"]), (signal.SIGHUP, [])])
    def test_cancelled_while_sbatch_is_at_it(self, kept, slurm, monkeypatch, number, ended):
        """SIGTERM is Slurm's; at SIGHUP the script has ended by itself, as after a failure, and the chain goes on."""
        add = services.add_replicas

        def add_slowly(*args, **options):
            done = add(*args, **options)
            slurm.job("102_0", "CANCELLED", after_cancel=True, nodes="")
            ending.note(number)
            return done

        ending = Ending()
        monkeypatch.setattr(services, "add_replicas", add_slowly)
        set_time_limit(slurm, ends_in_s=300)
        assert service_keeper.run([kept], ending) == 0
        assert slurm.cancelled == ended

    def test_the_program_keeps_its_pid_until_the_script_ends_it(self, kept):
        self.stop(kept)
        ending = Ending()
        program = threading.Thread(target=service_keeper.run, args=([kept], ending), daemon=True)
        program.start()
        program.join(0.5)
        assert program.is_alive()
        ending.note(signal.SIGHUP)
        program.join(60)
        assert not program.is_alive()

    def test_a_signal_that_finds_the_program_already_waiting_is_seen(self):
        """Its handler runs in the main thread alone, which the signal of another thread does not wake by itself."""
        code = (
            "import signal, sys, threading\n"
            "from hpc_serve.submit.services.service_keeper import Ending\n"
            "ending, main = Ending(), threading.main_thread().ident\n"
            "ending.listen()\n"
            "def send():\n"
            "    looks = 0\n"
            "    while looks < 20:\n"
            "        looks += 'wait' in sys._current_frames()[main].f_code.co_name\n"
            "        threading.Event().wait(0.01)\n"
            "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
            "threading.Thread(target=send, daemon=True).start()\n"
            "print(ending.wait(60), ending.by_slurm)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.stdout == "True True\n", done.stderr

    def test_scale_counts_no_successor(self, kept, slurm, store):
        job_id = submit_successor(kept)
        slurm.queue(("101", "RUNNING", "None"), (job_id, "PENDING", "Priority"))
        done = scale(store, "8b", 1)
        assert (done.before, done.added, done.ended) == (1, (), ())

    def test_the_notice_before_the_limit_ends_no_chain(self, kept, slurm):
        ask_to_drain(drain_file_of(kept), DrainRequest(by="Slurm, before the time limit", deadline_s=10))
        assert submit_successor(kept) == "102_0"


def test_a_requeued_job_follows_the_successor_that_it_had(kept, slurm, store):
    submit_successor(kept)
    again = replace(kept, restart=1)
    store.write(make_record(service="8b", model=MODEL, job_id="101", restart=1, state="starting"))
    slurm.queue(("101", "RUNNING", "None"), ("102_0", "RUNNING", "None"))
    stubs = StubService(store.home, "8b")
    try:
        stubs.start(job_id="102_0", model=MODEL)
        assert again.step(time.time()) is None
    finally:
        stubs.close()
    asked = drain_file(store, "8b", job_id="101", restart=1, replica=0)
    assert read_drain_request(asked).by.startswith("hpc-serve keep-up")


def test_sentences():
    assert successor_sentence(Successor(), "") == ""
    assert successor_sentence(Successor(tries=1), "") == "is being submitted"
    assert successor_sentence(Successor(job_id="7_0", tries=1), "pending") == "7_0 pending"
    assert successor_sentence(Successor(problem="no sbatch"), "") == "no sbatch"


class TestScript:
    def script(self, **fields):
        request = ServeRequest(model="8b", service="8b", **fields)
        return render_script(request, plan_service(request))

    def test_the_program_is_started_once_and_ended_with_the_script(self):
        text = self.script(keep_up=True, slurm=SlurmOptions(signal="B:USR1@300"))
        assert "python -m hpc_serve.submit.services.service_keeper --service 8b --keep-up --notice-s 300 &\n" in text
        assert "hpc-serve render --model 8b --gpu h100-80gb --keep-up --time 12:00:00 --signal B:USR1@300\n" in text
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        without = self.script(slurm=SlurmOptions(signal="B:USR1@300"))
        assert "keeper" not in without
        assert "keep-up" not in without

    @pytest.mark.parametrize("code", [0, 3])
    def test_its_end_does_not_change_the_scripts_exit_code(self, tmp_path, code):
        text = self.script(keep_up=True)
        found = re.search(r"^ *\[\[ -n \$keeper \]\] \|\| \{\n.*?^ *\}\n", text, re.MULTILINE | re.DOTALL)
        assert found
        start = re.sub("python .*&", "sleep 300 &", found.group())
        assert "sleep 300 &" in start
        script = f"set -euo pipefail\nkeeper=''\ntrap true TERM INT USR1\n{start}exit {code}\n"
        bash = ["env", "--default-signal=HUP", "bash", "-c"]  # the tests may run under nohup
        for _ in range(100):  # a signal that came between fork and exec was lost once in a hundred
            assert subprocess.run([*bash, script], timeout=60, check=False).returncode == code

    def test_refused_where_it_cannot_work(self):
        with pytest.raises(InvalidRequestError, match="leave it out with --cluster local"):
            ServeRequest(model="8b", service="8b", keep_up=True, cluster="local")
        image = Environment(kind="apptainer", path="/images/vllm.sif")
        with pytest.raises(InvalidRequestError, match=r"image /images/vllm\.sif.*--chain 7 is seven jobs"):
            ServeRequest(model="8b", service="8b", keep_up=True, environment=image)

    def test_submit_and_render_take_it(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("HPC_SERVE_SITE", str(tmp_path / "site.yaml"))
        (tmp_path / "site.yaml").write_text("time: 24:00:00\n")
        assert run_command(["render", "8b", "--keep-up"]) == 0
        assert "service_keeper --service 8b --keep-up" in capsys.readouterr().out


def test_the_successor_gets_the_environment_of_the_submission(slurm):
    of_script = {"SLURM_JOB_ID": "101", "PATH": str(slurm.bin), "HPC_SERVE_MODEL": "m", "CUDA_VISIBLE_DEVICES": "0,1"}
    ours = of_script | {"HPC_SERVE_JOB_DIR": "/run", "VIRTUAL_ENV": "/env", "PATH": f"/env/bin:{slurm.bin}"}
    assert submission_environ(ours, of_script) == {
        "SLURM_JOB_ID": "101",
        "PATH": str(slurm.bin),
        "HPC_SERVE_MODEL": "m",
    }
    assert submission_environ(ours, of_script | {"PATH": "/nowhere"})["PATH"] == f"/env/bin:{slurm.bin}"


def test_the_program_as_a_script_starts_it(kept, slurm, store, tmp_path):
    """It submits from the folder and with the environment of the submission, and ends when its script does."""
    set_time_limit(slurm, ends_in_s=300)
    sbatch = slurm.bin / "sbatch"
    told = tmp_path / "sbatch-environment"
    sbatch.write_text(sbatch.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n(pwd; env) > {told}\n"))
    script = tmp_path / "script.sh"
    script.write_text(
        f"""export PATH=/added:$PATH VIRTUAL_ENV=/added HPC_SERVE_JOB_ID=101 HPC_SERVE_JOB_DIR=/run
{sys.executable} -m hpc_serve.submit.services.service_keeper --service 8b --keep-up --notice-s 120 &
until grep -qs 102_0 {file_of(kept)}; do sleep 0.1; done
kill -HUP $!
wait $!
"""
    )
    folder = tmp_path / "submitted-here"
    folder.mkdir()
    environ = os.environ | {
        "SLURM_JOB_ID": "101",
        "SLURM_SUBMIT_DIR": str(folder),
        "HPC_SERVE_MODEL": "mine",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    done = subprocess.run(
        ["bash", str(script)], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "submitted the successor, job 102_0" in done.stderr
    where, *variables = told.read_text().splitlines()
    assert where == str(folder)
    assert {"HPC_SERVE_MODEL=mine", f"PATH={os.environ['PATH']}"} <= set(variables)
    unwanted = ("VIRTUAL_ENV=", "HPC_SERVE_JOB_", "CUDA_VISIBLE_DEVICES=", "SLURM_JOB_ID=", "SLURM_SUBMIT_DIR=")
    assert [line for line in variables if line.startswith(unwanted)] == []
    assert {job.job_id for job in store.read_submitted("8b")} == {"101", "102_0"}


def test_the_waiting_program_has_loaded_neither_plans_nor_submitit():
    code = """
import sys
import hpc_serve.submit.services.service_keeper
print([name for name in ("hpc_serve.plan", "submitit", "jinja2", "openai", "click", "yaml") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
