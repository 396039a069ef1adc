"""Keeps the LoRA adapters of an engine as they are wanted of its service: before it is ready, and from then on.

The record says which it has. `submit/services/adapters.py` writes down which are wanted, and reads the records.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import textwrap
from dataclasses import replace

from hpc_serve.errors import StoreError
from hpc_serve.job.engine.health import EngineAddress, told
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.redact import redact
from hpc_serve.rendezvous.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, Adapter
from hpc_serve.rendezvous.wanted_file import read_wanted, wanted_file

_log = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 1.0
_LOAD_S = 600.0
_LONGEST_FAULT = 1000
_NO_ROOM = "its engine has no room for adapters: it was started without --enable-lora, or with several API servers"


class Adapters:
    """The adapters of one start of an engine. `has_room`: the engine was told to take adapters while it runs."""

    def __init__(self, address: EngineAddress, keeper: RecordKeeper, *, has_room: bool) -> None:
        self._address, self._keeper, self._has_room = address, keeper, has_room
        self._here: dict[str, Adapter] = {}
        self._loaded: set[str] = set()
        self._seen: tuple[int, int] | None = None
        self._path = wanted_file(keeper.store, keeper.record.service)

    async def follow(self) -> None:
        """Load and unload as what is wanted changes, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            await self.bring()

    async def bring(self) -> None:
        """Load what is wanted and not loaded, unload what is not wanted any more, and say so in the record."""
        wanted = await asyncio.to_thread(self._wanted)
        if wanted is None:
            return
        for name in [name for name in self._here if name not in wanted]:
            del self._here[name]
            if name in self._loaded:
                self._loaded.discard(name)
                await asyncio.to_thread(self._ask, UNLOAD_ADAPTER, {"lora_name": name})
        for name, adapter in wanted.items():
            before = self._here.get(name)
            if before is not None and before.added_at == adapter.added_at:
                continue
            if self._keeper.record.state == "starting":
                self._keeper.set_stage(f"loading adapter {name}")
            fault = await asyncio.to_thread(self._load, name, adapter) if self._has_room else _NO_ROOM
            self._here[name] = replace(adapter, fault=fault)
        self._keeper.update(adapters=dict(self._here))

    def _load(self, name: str, adapter: Adapter) -> str:
        """Load an adapter, in the place of one of the same name; returns why that failed."""
        body = {"lora_name": name, "lora_path": adapter.path, "load_inplace": name in self._loaded}
        fault = self._ask(LOAD_ADAPTER, body)
        if not fault:
            self._loaded.add(name)
        _log.info("adapter %s of %s: %s", name, adapter.path, fault or "loaded")
        return fault

    def _ask(self, path: str, body: dict[str, object]) -> str:
        try:
            # vLLM may name each of 100,000 matrices, and a record of more than 1 MiB is none.
            return textwrap.shorten(redact(told(self._address, path, body, timeout_s=_LOAD_S)), _LONGEST_FAULT)
        except (OSError, http.client.HTTPException) as error:
            return f"the engine did not answer: {error or type(error).__name__}"

    def _wanted(self) -> dict[str, Adapter] | None:
        """Return what is wanted; None while nothing has changed, or cannot be read."""
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            wanted = read_wanted(self._keeper.store, self._keeper.record.service)
        except (OSError, StoreError):
            return None
        self._seen = seen
        return dict(wanted.adapters) if wanted is not None else None
