"""Several replicas in one job: what is asked for, submitted, shown, stopped and scaled; against stand-ins for Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError, WaitTimeoutError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.plans.planning import plan_service
from hpc_serve.submit.request.options import Environment, SlurmOptions
from hpc_serve.submit.services import stop as stopping
from hpc_serve.submit.services.want import scale
from hpc_serve.submit.status.status_reader import find
from hpc_serve.units import GIB
from tests.cluster import wait_for
from tests.support.fake_slurm import FakeSlurm
from tests.support.nodes import write_program
from tests.support.stubs import StubService, make_record
from tests.unit.submit import service_8b
from tests.unit.submit.service_8b import MODEL, states
from tests.unit.submit.test_render import bash_accepts

request = partial(service_8b.request, replicas_per_job=4)
script = partial(service_8b.script, replicas_per_job=4)
submit = partial(service_8b.submit, replicas_per_job=4)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


class TestScript:
    def test_a_node_of_eight_is_divided(self):
        text = script(gpus_per_node=8)
        bash_accepts(text)
        assert {"--nodes=1", "--gpus-per-node=8", "--cpus-per-task=32", "--mem=144G"} <= set(directives(text))
        assert "--array" not in text
        assert '"8b": 4 replicas, each on 1/4 of 1 node x 8 GPUs (h100-80gb), TP=2 x PP=1.' in text
        assert '--replica "$replica/4" --backend auto --gpus-per-node 2 -- \\\n' in text
        assert "for replica in 0 1 2 3; do" in text
        assert 'HPC_SERVE_JOB_ID-$replica-node%n.log"' in text

    @pytest.mark.parametrize(("per_job", "asked", "width"), [(1, None, 1), (2, None, 4), (8, None, 1), (4, 1, 1)])
    def test_each_engine_uses_all_of_its_part_unless_sizes_are_asked_for(self, per_job, asked, width):
        text = script(replicas_per_job=per_job, tensor_parallel_size=asked)
        assert f"--tensor-parallel-size {width} \\\n" in text
        assert f"--gpus-per-node={width * per_job}" in directives(text)

    def test_replicas_are_those_of_all_jobs(self):
        text = script(replicas=8)
        assert "--array=0-1" in directives(text)
        assert "8 replicas, each on 1/4 of 1 node" in text
        assert "hpc-serve render --model 8b --replicas 8 --replicas-per-job 4 " in text

    def test_the_memory_of_a_cpu_node_is_divided(self):
        socket = plan_service(request(replicas_per_job=1, gpu="cpu", gpu_memory_bytes=256 * GIB))
        part = plan_service(request(gpu="cpu", gpu_memory_bytes=256 * GIB))
        assert part.accelerator.total_bytes == 128 * GIB  # of two sockets' memory
        assert part.memory.kv_cache_bytes < socket.memory.kv_cache_bytes / 2
        share = SlurmOptions(exclusive=False, cpus_per_task=16)
        assert "--mem=512G" in directives(script(gpu="cpu", gpu_memory_bytes=256 * GIB, slurm=share))

    def test_what_does_not_fit_says_how_much_each_has(self):
        each = r"An engine has 1/8 of a node with --replicas-per-job 8\. .* not fit"
        with pytest.raises(DoesNotFitError, match=each):
            script(model="70b", replicas_per_job=8)

    def test_a_value_of_several_lines_stays_what_it_is(self):
        """The body of a function is indented; a value must not be."""
        text = script(engine_args=("--chat-template", "a\n  'b' \\n"))
        bash_accepts(text)
        (line,) = (line for line in text.splitlines() if line.strip().startswith("--chat-template"))
        words = line.strip().removesuffix("\\")
        told = subprocess.run(["bash", "-c", f"printf '%s|' {words}"], capture_output=True, text=True, check=True)
        assert told.stdout == "--chat-template|a\n  'b' \\n|"


# What stands in for `python`: it writes down which replica is prepared or started, and ends as the next line of the
# file `ends-K` says: with an exit code, or after a signal.
PYTHON = """#!/bin/bash
while [[ $# -gt 0 && $1 != --replica ]]; do [[ $1 != hpc_serve.job ]] || program=launch; shift; done
replica=${2%/*}
echo "${program:-prepare} $replica" >> calls
[[ -n ${program:-} ]] || { echo "export HPC_SERVE_LOG_DIR=."; exit; }
end=$(head -n 1 ends-$replica); sed -i 1d ends-$replica
[[ $end == TERM ]] || exit "$end"
trap 'exit 0' TERM
echo "waits $replica" >> calls
while :; do sleep 0.05; done
"""


def of_this_machine(replicas: int) -> str:
    """The script of so many replicas on this machine, with the programs on PATH."""
    environment = Environment(kind="none")
    return script(cluster="local", environment=environment, replicas_per_job=replicas, gpus_per_node=replicas)


class TestShell:
    """The script itself, on this machine; programs are stood in for."""

    def start(self, folder: Path, *ends: str) -> subprocess.Popen[bytes]:
        for replica, text in enumerate(ends):
            (folder / f"ends-{replica}").write_text(text.replace(" ", "\n") + "\n")
        write_program(folder / "python", PYTHON)
        (folder / "script.sh").write_text(of_this_machine(len(ends)))
        environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
        with (folder / "log").open("w") as log:
            return subprocess.Popen(["bash", "script.sh"], cwd=folder, env=environ, stdout=log, stderr=log)

    @pytest.mark.parametrize(
        ("ends", "code", "starts"),
        [
            (("0", "0"), 0, [1, 1]),
            (("0", "75 75 0"), 0, [1, 3]),  # a port was taken: the other one is left alone
            (("0", "75 75 75"), 75, [1, 3]),
            (("9", "0", "75 4"), 9, [1, 1, 2]),
            (("0", "75 4"), 4, [1, 2]),
        ],
    )
    def test_each_begins_again_for_itself_and_the_first_failure_is_the_jobs(self, tmp_path, ends, code, starts):
        assert self.start(tmp_path, *ends).wait(60) == code, (tmp_path / "log").read_text()
        calls = (tmp_path / "calls").read_text().split("\n")
        assert [calls.count(f"launch {replica}") for replica in range(len(ends))] == starts
        assert [calls.count(f"prepare {replica}") for replica in range(len(ends))] == starts

    def test_a_signal_reaches_those_that_run_still(self, tmp_path):
        process = self.start(tmp_path, "TERM", "6", "TERM")
        calls = tmp_path / "calls"
        wait_for(lambda: calls.exists() and calls.read_text().count("waits") == 2, 60, what="two that wait")
        wait_for(lambda: "launch 1" in calls.read_text(), 60, what="the other one")
        # bash loses the exit code of a child that ends as a signal comes
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(lambda: len(children.read_text().split()) == 2, 60, what="the end of the other one")
        process.terminate()
        assert process.wait(60) == 6, (tmp_path / "log").read_text()
        assert calls.read_text().count("launch") == 3

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_a_signal_before_there_is_a_launcher_reaches_it_all_the_same(self, tmp_path, replicas):
        """It comes while the run is prepared."""
        prepares = 'kill -TERM "${HPC_SERVE_JOB_ID#local-}"; echo "export HPC_SERVE_LOG_DIR=."'
        write_program(tmp_path / "python", f"#!/bin/bash\n[[ $1 != -c ]] || {{ {prepares}; exit; }}\nexec sleep 600\n")
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", of_this_machine(replicas)], cwd=tmp_path, env=environ, timeout=60, check=False
        )
        assert done.returncode in (128 + signal.SIGTERM, 0)  # 0 where bash lost the launcher's own


def test_each_replica_of_a_job_that_is_kept_has_its_own_program():
    text = script(keep_up=True, replicas=1, max_replicas=6, idle_stop_s=600.0, replicas_per_job=4)
    words = '--service 8b --replica "$replica" --keep-up --notice-s 120 --replicas 1:6 --idle-stop-s 600 &'
    assert f"service_keeper {words}\n" in text
    assert "#SBATCH --array" not in text
    bash_accepts(text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gpus_per_node": 6}, "4 replicas cannot divide the 6 GPUs of a node evenly: use 1, 2"),
        ({"gpu": "cpu-spr-2s", "gpu_memory_bytes": GIB, "replicas_per_job": 3}, "the 2 sockets of a node evenly"),
        ({"gpu": "v6e:2x4", "replicas_per_job": 2}, "the chips of a host serve one engine"),
    ],
)
def test_machines_that_cannot_be_divided(fields, why):
    with pytest.raises(InvalidRequestError, match=why):
        script(**fields)


# -- one job of four, 7, whose replicas serve


@pytest.fixture
def live(engines: StubService, slurm: FakeSlurm) -> None:
    slurm.queue(("7", "RUNNING", "None"))
    slurm.job("7", "RUNNING")
    for replica in range(4):
        engines.start(job_id="7", replica=replica, replicas_per_job=4, model=MODEL)


def write(store: ServiceStore, replica: int, state: str = "stopped", **fields) -> None:
    """What the launcher of a replica writes, at its end if nothing else is said."""
    of_job = {"service": "8b", "job_id": "7", "replica": replica, "replicas_per_job": 4, "model": MODEL}
    store.write(make_record(**{**of_job, "state": state, "reason": "as asked", **fields}))


class TestStatus:
    def test_a_job_that_waits_is_all_of_them(self, store, slurm, ran):
        job = submit(replicas=8).job.job_id
        assert states(store) == {f"101_{task}-{replica}": "pending" for task in range(2) for replica in range(4)}
        assert job == "101_0"
        assert "8b: 0/8 replicas ready\n" in ran(["status"]).out

    def test_each_is_shown_once_and_counted(self, store, slurm, live, ran):
        out = ran(["status"]).out
        assert out.endswith("8b: 4/4 replicas ready\n")
        assert [line.split()[1] for line in out.splitlines() if line.startswith("8b ")] == [f"7-{n}" for n in range(4)]

    def test_those_that_have_not_begun_are_counted_beside_those_that_have(self, store, slurm):
        submit()
        slurm.queue(("101", "RUNNING", "None"))
        slurm.job("101", "RUNNING")
        write(store, 2, "starting", job_id="101")
        assert states(store) == {f"101-{replica}": "starting" for replica in range(4)}

    def test_one_that_ended_is_over_while_its_job_runs(self, store, slurm, live):
        write(store, 1, "failed")
        assert states(store) == {"7-0": "ready", "7-1": "failed", "7-2": "ready", "7-3": "ready"}

    def test_the_end_of_the_job_is_the_end_of_all(self, store, slurm):
        for replica in range(2):
            write(store, replica, "starting")
        slurm.queue()
        slurm.job("7", "NODE_FAIL")
        assert states(store) == {"7-0": "failed", "7-1": "failed"}

    def test_the_logs_of_each_are_its_own(self, store, slurm, live, ran):
        store.log_dir("8b").mkdir(exist_ok=True)
        for name in ("7.log", "7-1-node0.log", "7-2-node0.log"):
            (store.log_dir("8b") / name).write_text(name)
        files = ran(["logs", "7-2", "--files"]).out.split()
        assert [path.rpartition("/")[2] for path in files] == ["7.log", "7-2-node0.log"]

    def test_they_are_found_by_job_and_by_name(self, store, slurm, live, ran):
        assert [status.name for status in find(store, "7")] == [f"7-{replica}" for replica in range(4)]
        (one,) = json.loads(ran(["status", "7-3", "--json"]).out)["services"]
        assert (one["name"], one["job_id"], one["replica"], one["replicas_per_job"]) == ("7-3", "7", 3, 4)


def test_a_submission_names_them(store, slurm, ran):
    told = json.loads(ran(["submit", "8b", "--replicas-per-job", "2", "--json"]).out)
    log = str(store.log_dir("8b") / "101.log")
    assert told["replicas"] == [{"name": f"101-{replica}", "job_id": "101", "log": log} for replica in range(2)]
    out = ran(["submit", "8b", "--replicas-per-job", "2"]).out
    assert "(2 replicas, 2 on one node, each 1 node x 4 GPUs, TP=4 PP=1)" in out
    assert "8b has 4 replicas now; it had 2 before" in out


class TestStop:
    @contextlib.contextmanager
    def launchers(self, store: ServiceStore, *replicas: int, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Ends these replicas once they are asked to drain, as their launchers would; then does what comes `then`."""

        def end() -> None:
            for replica in replicas:
                path = store.service_dir("8b") / f"7-r0-{replica}.drain"
                wait_for(path.exists, 60, what="an order to drain", step_s=0.01)
                path.unlink()
                write(store, replica)
            then()

        with ThreadPoolExecutor(1) as threads:
            ending = threads.submit(end)
            yield
            ending.result()

    def test_one_ends_and_its_job_goes_on(self, store, slurm, live):
        with self.launchers(store, 2):
            (ended,) = stopping.stop(store, find(store, "7-2"))
        assert (ended.name, ended.state, ended.reason) == ("7-2", "stopped", "as asked")
        assert slurm.cancelled == []
        assert states(store) == {"7-0": "ready", "7-1": "ready", "7-2": "stopped", "7-3": "ready"}

    def test_the_command_takes_its_name(self, store, slurm, live, ran):
        with self.launchers(store, 0, 3):
            assert "8b (job 7-0) is over: stopped: as asked\n" in ran(["stop", "8b", "--replica", "7-0"]).out
            assert "8b (job 7-3) is over: stopped: as asked\n" in ran(["stop", "7-3"]).out
        assert slurm.cancelled == []

    def test_the_option_takes_the_job_too(self, store, slurm, live, ran):
        slurm.job("7", "CANCELLED", after_cancel=True, nodes="")
        out = ran(["stop", "8b", "--replica", "7", "--now"]).out
        assert slurm.cancelled == ["7"]
        assert re.findall(r"job (7-\d)\) is over", out) == [f"7-{replica}" for replica in range(4)]

    def test_all_drain_and_the_job_is_not_cancelled(self, store, slurm, live):
        with self.launchers(store, *range(4), then=partial(slurm.job, "7", "COMPLETED", nodes="")):
            ended = stopping.stop(store, find(store, "8b"))
        assert [status.state for status in ended] == ["stopped"] * 4
        assert slurm.cancelled == []

    def test_a_job_with_one_that_serves_nobody_is_cancelled_once_the_others_have_drained(self, store, slurm, live):
        write(store, 3, "starting")
        slurm.job("7", "CANCELLED", after_cancel=True, nodes="")
        with self.launchers(store, 0, 1, 2):
            ended = stopping.stop(store, find(store, "8b"))
        assert slurm.cancelled == ["7"]
        assert {status.name: status.state for status in ended} == {f"7-{replica}": "stopped" for replica in range(4)}

    def test_one_that_does_not_end_is_told(self, store, slurm, live, monkeypatch):
        monkeypatch.setattr(stopping, "_WAY_DOWN_S", 0.0)
        said = r"7-1 was asked to end .* `hpc-serve stop 7` ends it with the others"
        with pytest.raises(WaitTimeoutError, match=said):
            stopping.stop(store, find(store, "7-1"), drain_s=0.1, timeout_s=0.1)
        assert slurm.cancelled == []

    def test_one_of_a_job_that_waits_cannot_end_alone(self, store, slurm):
        submit()
        with pytest.raises(InvalidRequestError, match=r"101-1 has not begun, .* hpc-serve stop 101"):
            stopping.stop(store, find(store, "101-1"))
        assert slurm.cancelled == []


class TestScale:
    def test_more_are_whole_jobs(self, store, slurm):
        submit()
        assert [job.job_id for job in scale(store, "8b", 12).added] == ["102_0", "102_1"]
        assert len(states(store)) == 12
        said = r"8b has 12 replicas, and a job of it has 4: it can have 20, or 16\."
        with pytest.raises(InvalidRequestError, match=said):
            scale(store, "8b", 18)
        assert len(slurm.scripts) == 2

    def test_fewer_are_whole_jobs(self, store, slurm):
        submit(replicas=8)
        with pytest.raises(InvalidRequestError, match="cannot lose 2 of its 8 replicas in whole jobs"):
            scale(store, "8b", 6)
        assert slurm.cancelled == []
        slurm.job("101_1", "CANCELLED", after_cancel=True, nodes="")
        done = scale(store, "8b", 4)
        assert slurm.cancelled == ["101_1"]
        assert sorted(status.name for status in done.ended) == [f"101_1-{replica}" for replica in range(4)]
