"""How many requests of a batch are under way, what it says of itself, and what it does when its service is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from hpc_serve import batch
from hpc_serve.batch.answer_files import AnswerFile
from hpc_serve.batch.sender import ReplicaView
from hpc_serve.cli.main import cli
from hpc_serve.client import services
from hpc_serve.client.engine_work import ReplicaWork, WorkWatch
from hpc_serve.client.openai_client import AsyncServiceClient
from tests.support.page_world import PageWorld
from tests.support.patience import wait_until
from tests.unit.batch.conftest import request_line
from tests.unit.batch.test_batch import ids, run


def test_the_window_shrinks_while_requests_wait_at_the_engine(service, requests, output):
    """The engine works on two at once, and its record says eight."""
    service.start("--stub-slots", "2", "--stub-word-s", "0.02")
    windows = []
    answers = run(requests(150), output, tick_s=0.1, on_tick=lambda p: windows.append(p.window))
    assert answers[-1].progress.answered == 150
    assert min(windows) < 5
    assert max(windows) <= 9


def test_never_more_are_under_way_than_two_replicas_take(service, requests, output):
    for _ in range(2):
        service.start()
    seen = [0]
    answers = run(requests(100), output, tick_s=0.01, on_tick=lambda p: seen.append(p.in_flight))
    assert len(answers) == 100
    assert max(seen) <= 18


def test_the_window_stays_while_an_engine_says_nothing_of_its_work(serving, tmp_path, monkeypatch):
    progress = batch.Progress()
    view = ReplicaView("405b", tmp_path / "home", progress, clients=1)
    view.look(0.0)
    assert progress.window == 9
    progress.window = 4
    with monkeypatch.context() as patched:
        patched.setattr(WorkWatch, "look", lambda self, statuses: [ReplicaWork(problem="busy") for _ in statuses])
        view.look(1.0)
    assert progress.window == 4
    view.look(1.0)
    assert progress.window == 5


def test_an_unexpected_error_ends_the_batch(serving, requests, monkeypatch, output):

    async def fails(*_, **__):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(AsyncServiceClient, "post", fails)
    with pytest.raises(RuntimeError, match="unexpected"):
        run(requests(20), output)


def test_an_error_of_the_caller_ends_the_batch(service, requests, output):
    service.start("--stub-word-s", "5")

    def fails(progress: batch.Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(requests(3), output, tick_s=0.01, on_tick=fails)


def test_a_service_that_is_gone_is_waited_for(service, requests, output):
    """Its one engine ends in the middle, and another job begins later."""
    first = service.start("--stub-word-s", "0.01")
    again: list[threading.Timer] = []

    def replace(progress: batch.Progress) -> None:
        if progress.answered > 20 and not again:
            first.kill()
            record = service.publish(first, predicted={"max_num_seqs": 8.0}, counter=2)
            service.renew(record, state="failed", reason="killed")
            again.append(threading.Timer(0.5, service.start))
            again[0].start()

    answers = run(requests(100), output, tick_s=0.05, on_tick=replace, wait=60.0)
    assert again
    assert answers[-1].progress.answered == 100
    assert sorted(ids(output)) == sorted(f"q{n}" for n in range(100))


def test_memory_does_not_grow_with_the_file(service, requests, tmp_path):
    """Ten times the lines take within a tenth of the memory."""
    service.start()
    code = (
        "import asyncio, re, sys; from hpc_serve import batch\n"
        "async def main():\n    async for _ in batch.run(sys.argv[1], sys.argv[2], service='405b'): pass\n"
        "asyncio.run(main())\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
    )
    peaks = []
    for lines in (300, 3000):
        argv = [sys.executable, "-c", code, requests(lines), tmp_path / f"out-{lines}.jsonl"]
        peaks.append(int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < 1.1 * peaks[0]


def test_gpu_hours_are_those_of_all_replicas(service, requests, output):
    service.start("--stub-word-s", "0.05", num_nodes=2, gpus_per_node=4)
    found = []
    tell = {"tick_s": 0.05, "on_tick": lambda p: found.append((p.gpu_hours, p.replicas))}
    last = run(requests(30), output, **tell)[-1].progress
    assert last.gpu_hours > 0
    # Eight GPUs, for no longer than the run and one look.
    assert last.gpu_hours <= 8 * (last.serving_s + 60) / 3600
    assert found == sorted(found)
    assert {replicas for _, replicas in found} - {0} == {1}  # 0 before the first look


def task_of_array(count, least, most, number):
    """The environment of a task of a job array."""
    values = {"COUNT": count, "MIN": least, "MAX": most, "ID": number}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


class TestCommand:
    @pytest.fixture
    def call(self, service, requests, tmp_path):
        service.start()
        words = ["batch", str(requests(6)), str(tmp_path / "out.jsonl"), "--service", "405b"]

        def told(*options, code=0, env=None):
            done = CliRunner().invoke(cli, [*words, *options], env=env)
            assert done.exit_code == code, done.output
            return done.output

        return told

    def test_it_says_what_was_done(self, call):
        told = call()
        assert "6 answered, 0 were there. 6/6 lines" in told
        assert "GPU-hours, 0 failed" in told
        assert "Nothing was left to ask." in call()

    def test_lines_that_failed_before_are_told_again(self, call, requests):
        requests([request_line("good"), request_line("long", "long " * 30_000)])
        call(code=1)
        again = call(code=1)
        assert "Nothing was left to ask." in again
        assert "1 failed: " in again

    def test_options_of_sbatch_are_for_a_job_of_its_own(self, call):
        assert "add --detach" in call("--partition", "cpu", code=2)

    @pytest.mark.parametrize(("first", "step"), [(0, 1), (1, 1), (10, 5)])
    def test_a_task_of_a_job_array_takes_its_shard(self, call, tmp_path, first, step):
        for place in range(3):
            call(env=task_of_array(3, first, first + 2 * step, first + place * step))
            assert sorted(ids(tmp_path / f"out.{place + 1}-of-3.jsonl")) == [f"q{place}", f"q{place + 3}"]
        assert "6 answers" in call("--merge")

    def test_uneven_numbers_of_an_array_are_refused(self, call):
        assert "no even numbers" in call(env=task_of_array(3, 0, 5, 1), code=2)


@pytest.fixture
def world(tmp_path, requests):
    with PageWorld(tmp_path) as world:
        requests(6).rename(world.clone / "in.jsonl")
        yield world


def environ_of(world, **further):
    """How a line is run by bash, as a person or Slurm would."""
    return {"cwd": world.clone, "env": {**world.environ(), **further}, "stderr": subprocess.STDOUT, "text": True}


def shell(world, text, code=0, **further):
    """Return what a line prints, which must end with this exit code."""
    done = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, check=False, **environ_of(world, **further))
    assert done.returncode == code, done.stdout
    return done.stdout


def wait_for_answers(world, process):
    """Return the output once the process has written to it, or has ended."""
    output = world.clone / "out.jsonl"
    wait_until(lambda: process.poll() is not None or (output.exists() and output.stat().st_size))
    return output


def call(world, options, code=0):
    return shell(world, f"hpc-serve batch in.jsonl out.jsonl {options}", code)


def service_of(world, name):
    (found,) = [one for one in services(home=world.store_home) if one.service == name]
    return found


def is_over(world, name):
    return all(one.is_over for one in service_of(world, name).replicas)


class TestServiceOfItsOwn:
    def test_it_is_started_if_lines_are_left_and_stopped_afterwards(self, world):
        call(world, "--model 8b --replicas 2")
        assert len(set(ids(world.clone / "out.jsonl"))) == 6
        assert len(service_of(world, "8b").replicas) == 2
        assert is_over(world, "8b")
        assert "Nothing was left to ask." in call(world, "--model 8b --service other")
        assert "other" not in {one.service for one in services(home=world.store_home)}

    def test_it_is_stopped_after_a_failure(self, world):
        lines = (request_line(f"q{n}", url="/v1/responses") + "\n" for n in range(101))
        (world.clone / "in.jsonl").write_text("".join(lines))
        assert "The first 100 lines all failed" in call(world, "--model 8b", code=1)
        assert is_over(world, "8b")

    def test_it_is_stopped_after_ctrl_c(self, world, requests):
        requests(50_000).rename(world.clone / "in.jsonl")
        command = "exec env --default-signal=INT hpc-serve batch in.jsonl out.jsonl --model 8b"  # tests may ignore it
        process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, **environ_of(world))
        output = wait_for_answers(world, process)
        process.send_signal(signal.SIGINT)
        assert "the same command goes on" in process.communicate(timeout=120)[0]
        assert process.returncode
        assert is_over(world, "8b")
        assert 0 < len(ids(output)) < 5000

    def test_a_service_that_is_there_is_used_and_stays(self, world):
        assert "70b is there already, and stays" in call(world, "--model 70b")
        assert service_of(world, "70b").ready

    def test_a_service_is_stopped_on_request_also_where_nothing_was_left(self, world):
        call(world, "--service 70b")
        assert "Nothing was left to ask." in call(world, "--service 70b --stop")
        assert is_over(world, "70b")

    def test_a_batch_that_is_refused_stops_nothing(self, world):
        first = AnswerFile(world.clone / "out.jsonl")
        assert "Another batch is writing" in call(world, "--service 70b --stop", code=1)
        first.close()
        assert service_of(world, "70b").ready

    @pytest.mark.parametrize(
        "options", ["--model 8b --shard 1/2", "--replicas 2", "--stop", "--detach", "--service 70b --stop --shard 1/2"]
    )
    def test_options_that_do_not_go_together_are_refused(self, world, options):
        call(world, options, code=2)


class TestJobOfItsOwn:
    """The script that `--detach` hands to sbatch, run by bash as Slurm would."""

    @staticmethod
    def submit(world, options="--service 70b"):
        said = call(world, f"--detach {options}")
        (script,) = (world.store_home / "batch" / "scripts").glob("*.sh")
        return said, script

    @staticmethod
    def run_job(world, script, **further):
        return shell(world, f"bash {script}", **{"SLURM_JOB_ID": "101", **further})

    def test_it_answers_all_lines(self, world):
        said, script = self.submit(world, "--service 70b --partition cpu --time 30 --in-order --retries 7")
        assert re.search(r"submitted as job 101\n  progress  tail -f .*/batch/logs/101\*\.log", said)
        text = script.read_text()
        for line in ("partition=cpu", "time=30", "requeue", "open-mode=append", "mem=4G", "signal=B:USR1@120"):
            assert f"#SBATCH --{line}\n" in text
        assert "--gpus" not in text
        assert "6 answered" in self.run_job(world, script)
        assert ids(world.clone / "out.jsonl") == [f"q{n}" for n in range(6)]

    def test_before_its_time_limit_it_is_queued_again(self, world, requests):
        requests(3000).rename(world.clone / "in.jsonl")
        _, script = self.submit(world)
        scontrol = world.slurm.bin / "scontrol"
        scontrol.write_text(f"#!/bin/bash\necho $* > {world.folder}/requeued\n")
        how = environ_of(world, SLURM_JOB_ID="101")
        job = subprocess.Popen(["bash", script], stdout=subprocess.DEVNULL, start_new_session=True, **how)
        output = wait_for_answers(world, job)
        job.send_signal(signal.SIGUSR1)
        requeued = world.folder / "requeued"
        wait_until(lambda: requeued.exists() and requeued.read_text() == "requeue 101\n")
        assert job.poll() is None, "it goes on until Slurm ends it"
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        before = len(output.read_bytes().splitlines())
        self.run_job(world, script, SLURM_RESTART_COUNT="1")
        assert sorted(ids(output)) == sorted(f"q{n}" for n in range(3000))
        assert 0 < before < 3000

    def test_its_service_is_started_before_and_stopped_by_it(self, world):
        _, script = self.submit(world, "--model 8b")
        assert "--service 8b" in script.read_text()
        self.run_job(world, script)
        assert service_of(world, "8b").replicas
        assert is_over(world, "8b")

    def test_a_bad_line_is_told_before_the_queue(self, world):
        (world.clone / "in.jsonl").write_text("{}\n")
        assert "in.jsonl, line 1" in call(world, "--detach --model 8b", code=2)
        assert not (world.folder / "slurm" / "sbatch-words").exists()
        assert not (world.clone / "out.jsonl").exists()

    def test_a_job_array_takes_shards_and_has_a_log_for_each(self, world):
        _, script = self.submit(world, "--service 70b --sbatch=--array=1-3")
        text = script.read_text()
        assert "#SBATCH --array=1-3\n" in text
        assert "/%A_%a.log\n" in text
        for task in (1, 2, 3):
            self.run_job(world, script, **task_of_array(3, 1, 3, task))
        assert "6 answers" in call(world, "--merge")
