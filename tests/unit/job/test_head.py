"""An engine over Ray keeps what it compiles only if every node has the head's folder of caches, and its lock.

Whether all have it is told by `WorkerLinks.have_cache` (test_parts.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_serve.job.cache.engine_cache import open_cache
from hpc_serve.job.cleanup.node_dir import make_run_dir
from hpc_serve.job.head import Head, run_head
from hpc_serve.job.links.control import WorkerLinks
from hpc_serve.job.machine.process import marked_pids
from hpc_serve.job.run.node import LaunchOptions
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.job.worker import run_worker
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, ask_to_drain, drain_file
from tests.support.nodes import ALLOCATION, make_node, write_program
from tests.support.stubs import SCRIPT
from tests.unit.rendezvous.test_record import FULL

KEY = "0" * 16


@pytest.mark.parametrize(
    ("backend", "others_have_it", "is_kept"), [("ray", True, True), ("ray", False, False), ("mp", False, True)]
)
def test_nodes_agree_on_the_folder(tmp_path, monkeypatch, backend, others_have_it, is_kept):
    environ = {"HPC_SERVE_CACHE_DIR": str(tmp_path / "caches"), "HPC_SERVE_HOME": str(tmp_path / "home")}
    store = ServiceStore(tmp_path / "home")
    store.ensure_service(FULL.service)
    told: list[str] = []

    async def tell_all(self, kind: str) -> None:
        told.append(kind)

    monkeypatch.setattr(WorkerLinks, "have_cache", lambda self, path: others_have_it and path.startswith(str(tmp_path)))
    monkeypatch.setattr(WorkerLinks, "tell_all", tell_all)

    async def agree(cache) -> bool:
        keeper = RecordKeeper(store, replace(FULL, state="starting", cache=cache.words))
        head = Head(make_node(tmp_path, backend=backend, cache=cache), keeper, cast(Any, None))
        keeps_cache = head._agree_on_cache()
        await head._keep_cache()
        used = head._node.child_environ()["VLLM_CACHE_ROOT"]
        assert used == str((cache.path if is_kept else tmp_path / "cache") / "vllm")
        assert keeper.record.cache == head._node.cache.words
        return keeps_cache

    with open_cache(KEY, tmp_path, environ, ALLOCATION) as cache:
        assert asyncio.run(agree(cache)) == is_kept
    assert told == ["ready"]
    with open_cache(KEY, tmp_path, environ, ALLOCATION) as again:
        assert again.is_warm == is_kept


# -- A head and a worker that each have a server (`--data-parallel-hybrid-lb`), in one process; the engines are stubs


MOST_S = 120
WORDS = "vllm serve m -dp 2 --data-parallel-hybrid-lb"


@pytest.fixture
def both(tmp_path: Path):
    """A function that runs a head and a worker beside `scenario(records)`, and their store.

    The function returns the exit codes, and the last records in order.
    """
    tmp_path.chmod(0o700)
    store = ServiceStore(tmp_path / "home")
    store.ensure_service("8b")
    becomes = f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(SCRIPT)!r}, *sys.argv[1:]])"
    write_program(tmp_path / "bin" / "vllm", f"#!{sys.executable}\nimport os, sys\n{becomes}\n")
    run_dir = make_run_dir(store.home, ALLOCATION)

    def node(rank: int):
        folder = tmp_path / f"node{rank}"
        folder.mkdir(mode=0o700)
        return make_node(
            folder,
            backend="mp",
            words=WORDS,
            options=LaunchOptions(service="8b", backend="mp", gpus_per_node=1, preflight="off"),
            allocation=replace(ALLOCATION, node_rank=rank, node_name=f"n{rank + 1}"),
            run_mark=f"test-{os.getpid()}-{rank}",
            environ={
                "PATH": f"{tmp_path / 'bin'}",
                "HPC_SERVE_HOME": str(store.home),
                "HPC_SERVE_JOB_DIR": str(run_dir),
                "HPC_SERVE_API_KEY_FILE": str(store.ensure_api_key("8b")),
                "HPC_SERVE_DRAIN_FILE": str(folder / "drain"),
                "HPC_SERVE_DRAIN_REQUEST": str(store.beside_record("8b", "1-r0-0.json", ".drain")),
            },
        )

    def records() -> list[EndpointRecord]:
        return sorted(store.read("8b").records, key=lambda record: record.replica)

    async def run(scenario: Callable[[list[EndpointRecord]], Awaitable[None]]):
        nodes = node(0), node(1)
        running = [asyncio.create_task(run_head(nodes[0])), asyncio.create_task(run_worker(nodes[1]))]
        while [record.state for record in records()] != ["ready", "ready"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await scenario(records())
        codes = await asyncio.wait_for(asyncio.gather(*running), MOST_S)
        assert not [pid for one in nodes for pid in marked_pids(one.run_mark)]
        return codes, records()

    return run, store


async def test_one_that_is_asked_to_drain_lets_all_drain(both):
    run, store = both

    async def scenario(records):
        found = [(one.replica, one.replicas_per_job, one.nodes[0].name) for one in records]
        assert found == [(0, 2, "n1"), (1, 2, "n2")]
        assert records[0].certificate != records[1].certificate
        ask_to_drain(drain_file(store, "8b", records[1].name), DrainRequest(by="a test", cause="stop", deadline_s=60))

    codes, records = await run(scenario)
    assert codes == [0, 0]
    assert [(one.state, one.drain_cause) for one in records] == [("stopped", "stop")] * 2
    assert "a test" in (records[0].reason or "")
    assert not list(store.home.glob("services/8b/*.drain"))


@pytest.mark.parametrize(("rank", "part"), [(0, "engine"), (1, "engine on n2")])
async def test_the_end_of_one_ends_all_and_all_records_name_it(both, rank, part):
    run, _ = both

    async def scenario(records):
        for pid in marked_pids(f"test-{os.getpid()}-{rank}"):
            os.kill(pid, signal.SIGKILL)

    codes, records = await run(scenario)
    assert codes == [137, 137 if rank == 1 else 0]
    assert [one.state for one in records] == ["failed", "failed"]
    assert records[0].failed_part == part
    assert records[1].failed_part == "engine"
    assert all("SIGKILL" in (one.reason or "") for one in records)
