"""An engine that hangs, or dies after it was ready, on a real cluster: it is found, left, and started again in place.

Real Slurm, and real Ray where several nodes are; the engine is the stub. test_serving.py kills a real vLLM once.
"""

from __future__ import annotations

import itertools
import json
import re
import signal

import pytest

from hpc_serve.submit.request.options import SlurmOptions
from tests.cluster import wait_for
from tests.e2e.jobs import STUB, Record, User, send, stub_script

pytestmark = [pytest.mark.slurm]

READY_S = 300
HANG_S = 25  # a record says for so long that its engine is unresponsive: a machine that stands still misses less


def serve(alice: User, service: str, *stub_args: str, env=None, **layout) -> str:
    job_id = alice.sbatch(alice.write(f"{service}.sh", stub_script(service, *stub_args, **layout)), env=env)
    alice.wait_until_ready(service, job_id, READY_S)
    return job_id


def signal_engine(alice: User, number: signal.Signals) -> None:
    pids = [p.pid for p in alice.processes() if str(STUB) in p.argv[:2] and "--headless" not in p.argv]
    assert pids
    send(pids, number)


def wait_for_start(alice: User, service: str, job_id: str, number: int) -> Record:
    def is_it(record: Record) -> bool:
        return (record["state"], record["engine_restarts"]) == ("ready", number)

    return alice.wait_for_record(service, job_id, is_it, READY_S)


def raylets(alice: User) -> set[int]:
    return {process.pid for process in alice.processes() if process.argv[0].endswith("raylet/raylet")}


def status_of(alice: User, service: str):
    (status,) = json.loads(alice.hpc_serve("status", service, "--json").stdout)["services"]
    return status


def test_a_frozen_engine_is_unresponsive_until_it_goes_on(alice):
    job_id = serve(alice, "frozen")
    signal_engine(alice, signal.SIGSTOP)
    record = alice.wait_for_record("frozen", job_id, lambda record: record["state"] == "unresponsive", 180)
    assert re.fullmatch(r"its engine has left /health unanswered for \d+ s", record["reason"])
    assert (status_of(alice, "frozen")["state"], status_of(alice, "frozen")["reason"]) == (
        "unresponsive",
        record["reason"],
    )
    signal_engine(alice, signal.SIGCONT)
    assert wait_for_start(alice, "frozen", job_id, 0)["reason"] is None
    signal_engine(alice, signal.SIGSTOP)
    alice.wait_for_record("frozen", job_id, lambda record: record["state"] == "unresponsive", 180)
    stopped = alice.hpc_serve("stop", "frozen")
    assert stopped.returncode == 0, stopped.stderr
    alice.wait_until_gone(job_id)


def test_an_engine_that_hangs_is_ended_and_started_again_while_others_wait_for_it(alice):
    hang = alice.home / "hang"
    job_id = serve(alice, "hangs", "--stub-hang-file", str(hang), env={"HPC_SERVE_HANG_S": str(HANG_S)})
    alice.write("hang", "")
    record = alice.wait_for_record("hangs", job_id, lambda record: record["state"] == "unresponsive", 180)
    assert "its engine has made no step" in record["reason"]
    waiting = alice.cluster.popen(["hpc-serve", "wait", "hangs"], user=alice.name, env=alice.environ)
    again = alice.wait_for_record("hangs", job_id, lambda record: record["state"] == "starting", 180)
    assert again["stage"].startswith("starting the engine again (1 of 3)")
    found = re.search(r"engine was unresponsive for (\d+) s: its engine has made no step", again["reason"])
    assert int(found[1]) >= HANG_S
    hang.unlink()
    wait_for_start(alice, "hangs", job_id, 1)
    said = waiting.communicate(timeout=300)[0]
    assert waiting.returncode == 0, said
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)


def test_an_engine_that_is_killed_again_and_again_is_started_three_times_over_the_same_ray(alice):
    layout = {"num_nodes": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    job_id = serve(alice, "mortal", "--stub-share-memory", **layout)
    ray = raylets(alice)
    assert len(ray) == 2
    ports = [wait_for_start(alice, "mortal", job_id, 0)["port"]]
    for number in (1, 2, 3):
        signal_engine(alice, signal.SIGKILL)
        ports.append(wait_for_start(alice, "mortal", job_id, number)["port"])
        assert raylets(alice) == ray
    assert len(ports) == 4
    assert all(port != before for before, port in itertools.pairwise(ports))  # by chance it may be an earlier one again
    signal_engine(alice, signal.SIGKILL)
    record = wait_for(
        lambda: (found := alice.record("mortal", job_id)) and found["state"] == "failed" and found, 180, what="its end"
    )
    assert record["failed_part"] == "engine"
    assert record["reason"].startswith("engine exited with 137; the kernel has killed ")
    assert record["reason"].endswith(" (it had been started again 3 times)")
    alice.wait_until_gone(job_id)
    assert "JobState=FAILED" in alice.run("scontrol", "show", "job", job_id).stdout
    assert not alice.run("sh", "-c", "ls /dev/shm", node=record["nodes"][0]["name"]).stdout.split()


def test_an_engine_that_spans_nodes_without_ray_ends_its_run_and_with_requeue_slurm_runs_the_job_again(alice):
    slurm = SlurmOptions(exclusive=False, cpus_per_task=4, mem="4G", requeue=True)
    layout = {"num_nodes": 2, "pipeline_parallel_size": 2, "backend": "mp", "slurm": slurm}
    job_id = serve(alice, "spans", **layout)
    signal_engine(alice, signal.SIGKILL)
    record = wait_for(
        lambda: (found := alice.record("spans", job_id)) and found["state"] == "failed" and found, 180, what="its end"
    )
    assert (record["failed_part"], record["engine_restarts"]) == ("engine", 0)
    assert record["reason"].startswith("engine exited with 137; the kernel has killed ")
    wait_for(lambda: status_of(alice, "spans")["state"] == "pending", 180, what="the next run, which waits")

    def job() -> str:
        return alice.run("scontrol", "show", "job", job_id).stdout

    assert "Restarts=1" in job()
    # Slurm gives a pending job its reason only when its scheduler next looks at it
    wait_for(lambda: "Reason=BeginTime" in job(), 180, what="Slurm's reason: it runs again after a pause")
    own_log = (alice.home / f"hpc-serve-spans-{job_id}.log").read_text()
    assert f"asking Slurm to run job {job_id} again (1 of 5): engine exited with 137" in own_log
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)
