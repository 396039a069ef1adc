"""An engine over Ray keeps what it compiles only if every node has the head's folder of caches, and its lock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hpc_serve.job.cache.engine_cache import open_cache
from hpc_serve.job.head import Head
from hpc_serve.job.links.link import Link
from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.nodes import ALLOCATION, make_node
from tests.unit.rendezvous.test_record import FULL

KEY = "0" * 16


class Worker:
    """The link of a node, with what it was told."""

    address, read = "10.0.0.2", ReadSoFar()

    def __init__(self, rank: int, cache: str) -> None:
        self.rank, self.name, self.cache = rank, f"n{rank}", cache
        self.told: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})

    async def receive(self) -> None:
        await asyncio.Event().wait()

    async def send_heartbeats(self, look: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("backend", "others", "is_kept"),
    [
        ("ray", ("the same", "the same"), True),
        ("ray", ("the same", "another"), False),
        ("ray", ("the same", ""), False),
        ("mp", ("another", ""), True),
    ],
)
def test_nodes_agree_on_the_folder(tmp_path: Path, backend, others, is_kept):
    environ = {"HPC_SERVE_CACHE_DIR": str(tmp_path / "caches"), "HPC_SERVE_HOME": str(tmp_path / "home")}
    store = ServiceStore(tmp_path / "home")
    store.ensure_service(FULL.service)

    async def agree(cache) -> tuple[bool, str, list[Worker]]:
        allocation = replace(ALLOCATION, num_nodes=3)
        node = make_node(tmp_path, backend=backend, allocation=allocation, cache=cache)
        keeper = RecordKeeper(store, replace(FULL, state="starting", cache=cache.words))
        head = Head(node, keeper, cast(Any, None))
        workers = [
            Worker(rank, str(cache.path) if has == "the same" else has) for rank, has in enumerate(others, start=1)
        ]
        for worker in workers:
            head._workers.add_worker(cast(Link, worker))
        keeps_cache = head._agree_on_cache()
        await head._workers.tell_all("go", keeps_cache=keeps_cache)
        await head._keep_cache()
        used = head._node.child_environ(address="127.0.0.1")["VLLM_CACHE_ROOT"]
        assert keeper.record.cache == head._node.cache.words
        return keeps_cache, used, workers

    with open_cache(KEY, tmp_path, environ, on_several_nodes=True) as cache:
        keeps_cache, used, workers = asyncio.run(agree(cache))
    assert keeps_cache == is_kept
    assert used == str((cache.path if is_kept else tmp_path / "cache") / "vllm")
    go = {"kind": "go", "keeps_cache": is_kept}
    for worker in workers:
        assert worker.told == [go, {"kind": "ready"}]
    with open_cache(KEY, tmp_path, environ, on_several_nodes=True) as again:
        assert again.is_warm == is_kept
