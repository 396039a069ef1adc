"""Whatever part ends, the job ends with it, says which part it was and why, and leaves no process on any node.

Real Slurm, real Ray over two hosts; the engine is the stub (tests/support/stub_engine.py), because what is tested is
what stands around it. test_serving.py does the same to a real vLLM where the engine's own reaction matters.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import User, send, stub_script, with_another_ray

pytestmark = [pytest.mark.slurm]

SILENCE_S = 10


def submit(alice: User, service: str, *stub_args: str, num_nodes: int = 2, env=None, edit=str, **layout) -> str:
    layout = {"num_nodes": num_nodes, "tensor_parallel_size": 2, "pipeline_parallel_size": num_nodes, **layout}
    script = alice.write(f"{service}.sh", edit(stub_script(service, *stub_args, **layout)))
    return alice.sbatch(script, env=env)


def on_one_node_only(script: str) -> str:
    """The script of somebody who edited the srun line: the second node gets no launcher."""
    edited = script.replace('--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"', "--nodes=1 --ntasks=1")
    assert edited != script
    return edited


def is_loading(record) -> bool:
    return record["stage"] == "loading weights"


def failed(alice: User, service: str, job_id: str, *, is_gone: bool = True):
    record = wait_for(
        lambda: (found := alice.record(service, job_id)) and found["state"] == "failed" and found, 300, what="failed"
    )
    if is_gone:
        alice.wait_until_gone(job_id)
    return record


def test_an_engine_that_dies_while_loading(alice):
    job_id = submit(
        alice, "dies", "--stub-fail", "torch.OutOfMemoryError: CUDA out of memory.", "--stub-exit-code", "3"
    )
    record = failed(alice, "dies", job_id)
    assert record["failed_part"] == "engine"
    assert "torch.OutOfMemoryError: CUDA out of memory." in record["reason"]
    assert record["last_log_lines"][-1] == "torch.OutOfMemoryError: CUDA out of memory."
    told = alice.hpc_serve("doctor", job_id)
    assert told.returncode == 6, told.stderr
    assert "\nCause: a GPU ran out of memory.\nTo do: " in told.stdout
    assert f"    {job_id}-node0.log:" in told.stdout
    assert "FAILED" in alice.run("scontrol", "show", "job", job_id).stdout


def test_a_load_that_stands_still_ends_though_ray_goes_on_reading(alice):
    layout = {"tensor_parallel_size": 2, "backend": "ray"}
    script = alice.write("still.sh", stub_script("still", "--stub-hang-loading", **layout))
    job_id = alice.sbatch(script, env={"HPC_SERVE_STALL_S": "20"})
    record = failed(alice, "still", job_id)
    assert record["failed_part"] == "engine"
    assert (
        "s while loading weights: the engine logs nothing new and reads nothing; 1 of 5 were done" in record["reason"]
    )


def test_an_engine_that_exits_with_0_before_it_was_stopped_has_failed(alice):
    job_id = submit(
        alice, "leaves", "--stub-exit-after-s", "2", "--stub-exit-code", "0", num_nodes=1, engine_restarts=0
    )
    record = failed(alice, "leaves", job_id)
    assert (record["failed_part"], record["exit_code"]) == ("engine", 1)
    assert "exited with 0 before it was stopped" in record["reason"]


def test_a_workers_raylet_is_killed(alice):
    job_id = submit(alice, "raylet")
    record = alice.wait_until_ready("raylet", job_id, 300)
    other = next(node["name"] for node in record["nodes"][1:])
    raylets = [p.pid for p in alice.processes() if p.host == other and p.argv[0].endswith("raylet/raylet")]
    send(raylets, signal.SIGKILL)
    record = failed(alice, "raylet", job_id)
    assert record["failed_part"] == f"ray worker on {other}"
    assert "raylet ended with -9" in record["reason"]


def test_a_node_that_never_joins_is_named_after_a_deadline(alice):
    job_id = submit(alice, "absent", env={"HPC_SERVE_JOIN_S": "3"}, edit=on_one_node_only)
    record = failed(alice, "absent", job_id)
    assert record["failed_part"] == "nodes"
    assert "no launcher from node rank 1" in record["reason"]


def test_a_node_whose_ray_cannot_start_is_named(alice):
    """On the second node alone, `ray` ends at once."""
    edit = with_another_ray(alice, "broken-ray", 1, '{ echo "no such library"; exit 9; }')
    job_id = submit(alice, "noray", edit=edit)
    record = failed(alice, "noray", job_id)
    assert record["failed_part"].startswith("ray worker on ")
    assert record["exit_code"] == 9
    assert record["last_log_lines"] == ["no such library"]


def folders_left(alice: User) -> list[str]:
    """What runs have on the hosts and in the shared home beside logs and records."""
    look = ("sh", "-c", "ls -d /tmp/hs-* /dev/shm/* 2>/dev/null")
    on_hosts = {node: alice.run(*look, node=node).stdout.split() for node in alice.cluster.nodes}
    left = [f"{node}:{path}" for node, paths in on_hosts.items() for path in paths]
    return [*left, *map(str, (alice.home / ".hpc-serve" / "jobs").iterdir())]


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_launcher_is_killed(alice, role):
    deaf = ("--stub-ignore-sigterm",) if role == "head" else ()  # on the other node it is the head's to kill
    job_id = submit(alice, f"killed-{role}", "--stub-share-memory", *deaf)
    record = alice.wait_until_ready(f"killed-{role}", job_id, 300)
    host = record["nodes"][0 if role == "head" else 1]["name"]
    launchers = [
        p.pid for p in alice.processes() if p.host == host and "hpc_serve.job" in p.argv and "srun" not in p.argv[0]
    ]
    assert launchers
    send(launchers, signal.SIGKILL)
    alice.wait_until_gone(job_id)
    assert not folders_left(alice)
    if role == "worker":
        assert f"launcher on node {host} ended" in alice.record(f"killed-{role}", job_id)["reason"]


def without_ray(alice: User, service: str, *stub_args: str) -> tuple[str, list[str]]:
    """A job of two nodes that hear of each other's silence soon: its id and its hosts, the head first."""
    layout = {"num_nodes": 2, "pipeline_parallel_size": 2, "backend": "mp"}
    script = alice.write(f"{service}.sh", stub_script(service, *stub_args, **layout))
    job_id = alice.sbatch(script, env={"HPC_SERVE_SILENCE_S": str(SILENCE_S)})
    record = alice.wait_until_ready(service, job_id, 300)
    return job_id, [node["name"] for node in record["nodes"]]


def on(alice: User, host: str) -> list[int]:
    return [process.pid for process in alice.processes() if process.host == host]


@contextlib.contextmanager
def frozen(alice: User, host: str):
    """All that the user runs on a host stands still."""
    pids: set[int] = set()
    try:
        while fresh := set(on(alice, host)) - pids:  # one may have ended meanwhile, or begun another
            pids |= fresh
            send(fresh, signal.SIGSTOP)
        yield
    finally:
        send(pids, signal.SIGCONT)


def test_what_a_run_that_was_killed_outright_left_goes_with_the_next_which_ends_with_a_frozen_node(alice):
    job_id, nodes = without_ray(alice, "outright", "--stub-share-memory")
    is_noted = ("sh", "-c", "ls /tmp/hs-*/shared-memory-watcher")
    wait_for(lambda: not any(alice.run(*is_noted, node=node).returncode for node in nodes), 180, what="notes of both")
    alice.kill_at_once()
    alice.wait_until_gone(job_id)
    left = folders_left(alice)
    assert len(left) == 2 + 2 + 1  # of each host: a folder, a segment; and the run's own
    job_id, (_, worker) = without_ray(alice, "frozen-worker")
    wait_for(lambda: not set(left) & set(folders_left(alice)), 180, what=f"the end of {left}")
    with frozen(alice, worker):
        record = failed(alice, "frozen-worker", job_id, is_gone=False)
        assert record["failed_part"] == f"node {worker}"
        assert record["reason"] == f"node {worker} has sent nothing for {SILENCE_S} s"
    alice.wait_until_gone(job_id)
    assert not folders_left(alice)


def test_a_frozen_head_is_left_by_the_others_and_told_by_status(alice):
    job_id, (head, worker) = without_ray(alice, "frozen-head")
    with frozen(alice, head):
        wait_for(lambda: not on(alice, worker), 180, what="the worker's launcher to end")
        (status,) = json.loads(alice.hpc_serve("status", "frozen-head", "--json").stdout)["services"]
        assert status["state"] == "unresponsive"
        assert "no answer from" in status["reason"]
    record = failed(alice, "frozen-head", job_id)
    assert record["failed_part"] == f"node {worker}"
    assert not folders_left(alice)


def test_a_job_outlives_a_suspension_and_ends_on_both_sides_of_a_parted_network(alice):
    job_id, (_, worker) = without_ray(alice, "parted")
    assert alice.cluster.run(["scontrol", "suspend", job_id], user="root").returncode == 0
    too_long = time.monotonic() + SILENCE_S + 1  # for a node that is frozen alone
    wait_for(lambda: time.monotonic() > too_long, 60)
    before = alice.record("parted", job_id)
    assert alice.cluster.run(["scontrol", "resume", job_id], user="root").returncode == 0

    def is_renewed_and_ready(record) -> bool:  # its engine may be found silent at first, and well at the next look
        return record["counter"] > before["counter"] + 1 and record["state"] == "ready"

    alice.wait_for_record("parted", job_id, is_renewed_and_ready, 180)

    alice.cluster.disconnect(worker)
    try:
        record = failed(alice, "parted", job_id, is_gone=False)
        wait_for(lambda: not on(alice, worker), 180, what="the worker's launcher to end")
    finally:
        alice.cluster.reconnect(worker)
    assert record["reason"] == f"node {worker} has sent nothing for {SILENCE_S} s"
    alice.wait_until_gone(job_id)
    assert not folders_left(alice)


def test_cancelled_while_pending(alice):
    job_id = submit(
        alice,
        "pending",
        edit=lambda text: text.replace("#SBATCH --nodes", "#SBATCH --begin=now+1hour\n#SBATCH --nodes"),
    )
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)
    assert alice.record("pending", job_id) is None


STAGES = {
    "nodes": (lambda record: record["stage"] == "waiting for the nodes' launchers", ()),
    "ray-head": (lambda record: record["stage"] == "starting Ray's head", ()),
    "ray": (lambda record: record["stage"] == "waiting for Ray nodes", ()),
    "loading": (is_loading, ("--stub-hang-loading",)),
    "ready": (lambda record: record["state"] == "ready", ()),
}


@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_in_every_stage(alice, stage):
    """Each lasts until it is cancelled."""
    is_there, stub_args = STAGES[stage]
    edit = {
        "nodes": on_one_node_only,
        "ray-head": with_another_ray(alice, "slow-head", 0, "exec sleep 600"),
        "ray": with_another_ray(alice, "slow-worker", 1, "exec sleep 600"),
    }.get(stage, str)
    job_id = submit(alice, f"cancel-{stage}", *stub_args, edit=edit)
    alice.wait_for_record(f"cancel-{stage}", job_id, is_there, 300)
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)
    record = alice.record(f"cancel-{stage}", job_id)
    assert record["state"] == "stopped"
    assert "SIGTERM" in record["reason"]
    assert not list((alice.home / ".hpc-serve" / "jobs").glob(f"{job_id}-*"))


TAKEN_PORT = 23_999


def with_taken_port(*, attempts: int) -> Callable[[str], str]:
    """Edits a script: another program on the head listens on TAKEN_PORT for so many attempts, at most while it runs."""
    stay = "any(time.sleep(0.1) or os.getppid() != parent for _ in range(6000))"
    listen = f"parent = os.getppid(); s = socket.create_server(('', {TAKEN_PORT})); {stay}"
    begin = (
        f'python -c "import os, socket, time; {listen}" & thief=$!; '
        f"until (: <>/dev/tcp/127.0.0.1/{TAKEN_PORT}) 2>/dev/null; do :; done"
    )

    def edit(script: str) -> str:
        before, launch, after = script.partition("    srun ")
        assert launch
        steps = (
            f"    if [[ $attempt -eq 1 ]]; then {begin}; fi\n    [[ $attempt -le {attempts} ]] || kill $thief || true\n"
        )
        return f"{before}{steps}{launch}{after}"

    return edit


def test_a_port_that_is_taken_at_each_attempt_leaves_a_record_that_doctor_explains(alice):
    job_id = submit(alice, "taken", "--port", str(TAKEN_PORT), num_nodes=1, edit=with_taken_port(attempts=3))
    record = failed(alice, "taken", job_id)
    assert record["exit_code"] == 75
    assert re.match(rf"Port {TAKEN_PORT} of n\d was taken by another program", record["reason"])
    assert "attempt 3 met a port or folder in use" in (alice.home / f"hpc-serve-taken-{job_id}.log").read_text()
    assert "leave --port out" in alice.hpc_serve("doctor", "taken").stdout


def test_a_port_that_was_taken_is_answered_with_others(alice):
    """A port that a person has named is another program's at the first attempt."""
    job_id = submit(alice, "clash", "--port", str(TAKEN_PORT), num_nodes=1, edit=with_taken_port(attempts=1))
    alice.wait_until_ready("clash", job_id, 300)
    assert "attempt 1 met a port or folder in use" in (alice.home / f"hpc-serve-clash-{job_id}.log").read_text()
    alice.cancel(job_id)
    alice.wait_until_gone(job_id)
