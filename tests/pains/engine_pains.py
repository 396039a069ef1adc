"""Pains whose words are the engine's own: real vLLM on CPUs, with a tiny model."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from hpc_serve.vllm.arguments import ARGS_FILE
from tests.cluster import wait_for
from tests.pains.pain import Seen, pain
from tests.pains.site import Job, Site

ONE_NODE: dict[str, Any] = {"num_nodes": 1}
SMALL = ("--kv-cache-memory-bytes", "67108864", "--max-model-len", "512")
LIMIT = 500 * 2**20


@pain(
    18,
    "memory limits misread: the kernel ends the engine",
    r"the kernel has killed \d+ process.* of this job on n1 for memory: its cgroup allows 500 MiB",
    needs_engine=True,
)
def small_cgroup(site: Site) -> Seen:
    """The first node's slurmd is in a cgroup of 500 MiB, though Slurm says that the job has 4 GiB."""
    with site.cgroup("n1", "memory", "memory.limit_in_bytes", LIMIT):
        return site.failed(site.submit_engine("small-cgroup", options=("--nodelist=n1",), **ONE_NODE))


@pain(12, "ready, then dies on the first request", r"cannot answer with pipeline parallelism", needs_engine=True)
def first_request(site: Site) -> Seen:
    """Pipeline parallelism with --enforce-eager, with which vLLM on CPUs starts and cannot answer."""
    layout: dict[str, Any] = {**ONE_NODE, "pipeline_parallel_size": 2, "backend": "mp"}
    return site.failed(
        site.submit_engine("first-request", *SMALL, "--enforce-eager", env={"VLLM_PLUGINS": "amx"}, **layout)
    )


@pain(23, "the cache has no room for one request", r"KV cache has no room for one request", needs_engine=True)
def long_request(site: Site) -> Seen:
    """A cache of 1 MiB, and requests of 8192 tokens; of a copy without the options that lie beside the model."""
    folder = site.alice.home / "long-request"
    site.alice.run("cp", "-r", str(site.model), str(folder))
    (folder / ARGS_FILE).unlink()
    words = ("--kv-cache-memory-bytes", "1048576", "--max-model-len", "8192", "--enforce-eager")
    env = {"HPC_SERVE_MODEL": str(folder)}
    return site.failed(site.submit_engine("long-request", *words, env=env, **ONE_NODE))


@pain(10, "/health says 200 after a hang", r"unresponsive", needs_engine=True, keeps_job=True)
def frozen_engine(site: Site) -> Seen:
    """SIGSTOP of the engine's core process, of which the server beside it knows nothing. Seconds are from then on."""
    job = _serving(site)
    pids = _cores(site)
    began_at = time.monotonic()
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        status = wait_for(
            lambda: (seen := site.status(job))["state"] == "unresponsive" and seen, 180, what="unresponsive", step_s=0.5
        )
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    said = f"unresponsive: {status['reason']}"
    return Seen(said=said, by="the gate", is_before_weights=None, seconds=time.monotonic() - began_at)


@pain(
    11,
    "a crashed job keeps its nodes",
    r"without a message; the kernel has killed none for memory on n1: another program or a person",
    needs_engine=True,
)
def killed_engine(site: Site) -> Seen:
    """kill -9 of the core process of the same engine. Seconds are from then on, until Slurm has its nodes back."""
    job = _serving(site)
    began_at = time.monotonic()
    for pid in _cores(site):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not site.alice.is_queued(job.job_id), 180, what="the end of the job")
    return site.doctor(job, time.monotonic() - began_at)


@pain(8, "Gloo's own words of an interface that is not there", r"no network interface", needs_engine=True)
def gloo_words(site: Site) -> Seen:
    """GLOO_SOCKET_IFNAME names an interface that no node has, and nobody looks before: torch meets it."""
    env = {"HPC_SERVE_PREFLIGHT": "off", "GLOO_SOCKET_IFNAME": "ib9", "NCCL_SOCKET_IFNAME": "ib9"}
    layout: dict[str, Any] = {"num_nodes": 2, "tensor_parallel_size": 2, "backend": "mp"}
    return site.failed(site.submit_engine("gloo-words", *SMALL, "--enforce-eager", env=env, **layout))


def _serving(site: Site) -> Job:
    """The engine of both: started by the first."""
    service = "serving"
    if site.serving is None or not site.alice.is_queued(site.serving.job_id):
        site.serving = site.submit_engine(
            service,
            *SMALL,
            "--enforce-eager",
            env={"HPC_SERVE_CANARY_S": "5", "HPC_SERVE_HANG_S": "120"},
            engine_restarts=0,
            **ONE_NODE,
        )
    job = site.serving
    wait_for(lambda: site.status(job)["state"] == "ready", 300, what="an engine that serves", step_s=0.5)
    return job


def _cores(site: Site) -> list[int]:
    pids = [one.pid for one in site.alice.processes() if one.argv and one.argv[0].startswith("VLLM::EngineCore")]
    assert pids, "no process VLLM::EngineCore"
    return pids
