"""An engine over Ray keeps what it compiles only if every node has the head's folder of caches, and its lock.

Whether all have it is told by `WorkerLinks.have_cache` (test_parts.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from hpc_serve.job.cache.engine_cache import open_cache
from hpc_serve.job.head import Head
from hpc_serve.job.links.control import WorkerLinks
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.nodes import make_node
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

    with open_cache(KEY, tmp_path, environ, on_several_nodes=True) as cache:
        assert asyncio.run(agree(cache)) == is_kept
    assert told == ["ready"]
    with open_cache(KEY, tmp_path, environ, on_several_nodes=True) as again:
        assert again.is_warm == is_kept
