"""Several replicas in one job, on this machine: rendered script, launchers, records. The engine is the stub.

How a node is divided is in test_share.py. Under Slurm it is tests/e2e/test_replicas_per_job.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_serve.rendezvous.store import DrainRequest, ask_to_drain, drain_file
from tests.support.local_run import Run

DEVICES = ("GPU-5ac1", "GPU-07b2", "MIG-11aa", "MIG-22bb")


@pytest.fixture
def run(start) -> Run:
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES)}
    return start(replicas_per_job=2, gpus_per_node=4, engine_restarts=0, variables=variables)


def engine_of(run: Run, replica: int) -> int:
    """The pid of a replica's engine."""
    (pid,) = (pid for pid in run.engines() if devices_of(pid) == DEVICES[2 * replica : 2 * replica + 2])
    return pid


def devices_of(pid: int) -> tuple[str, ...]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return tuple(next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")).partition("=")[2].split(","))


def test_each_has_its_own_and_ends_alone(run):
    first, second = run.wait_for_states("ready", "ready")
    assert (first.job_id, first.replicas_per_job, first.gpus_per_node) == (second.job_id, 2, 2)
    assert first.port != second.port
    assert first.certificate != second.certificate
    cores = [os.sched_getaffinity(engine_of(run, replica)) for replica in range(2)]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    logs = {path.name for path in run.store.log_dir("8b").iterdir()}
    assert logs == {f"{first.job_id}-{replica}-node0.log" for replica in range(2)}

    os.kill(engine_of(run, 0), signal.SIGKILL)
    failed, _ = run.wait_for_states("failed", "ready")
    assert (failed.failed_part, failed.exit_code) == ("engine", 137)
    assert run.stream() > 0  # at the other

    path = drain_file(run.store, "8b", f"{second.job_id}-r0-1.json")
    ask_to_drain(path, DrainRequest(by="a test", deadline_s=60))
    _, stopped = run.wait_for_states("failed", "stopped")
    assert stopped.reason is not None
    assert stopped.reason.startswith("a test")
    assert run.process.wait(60) == 137, run.log.read_text()  # the script's: that of the one that failed
    assert list((run.store.home / "jobs").iterdir()) == []


def test_a_signal_ends_all_of_them_well(run):
    run.wait_for_states("ready", "ready")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 0, run.log.read_text()
    run.wait_for_states("stopped", "stopped")


def test_without_a_list_of_devices_none_is_invented(start):
    run = start(replicas_per_job=2, gpus_per_node=4, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert run.process.wait(60) == 2, run.log.read_text()
    for record in run.wait_for_states("failed", "failed"):
        assert "divide the GPUs that CUDA_VISIBLE_DEVICES lists" in str(record.reason)
