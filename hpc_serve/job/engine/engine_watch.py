"""Looks after an engine: asks whether it still works, and keeps its LoRA adapters as the service wants them.

The gate in the engine's process knows whether the engine makes steps (`gate/engine_facts.py`), and /health says so.
An engine that has nothing to do is asked for one token, the canary: only a request shows whether an idle engine works.
The record says when the engine does not work, and which adapters it has. `submit/services/adapters.py` writes down
which are wanted. `engine` decides what follows when the engine is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import re
import textwrap
import threading
import time
from dataclasses import dataclass, field, replace

from hpc_serve.errors import RendezvousError, error_text
from hpc_serve.job.engine.health import EngineAddress, Look, SmallRequest, ask, look, read_weight_version, told
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.redact import redact
from hpc_serve.rendezvous.claims import read_wanted, wanted_file
from hpc_serve.rendezvous.gate_headers import ENGINE_WORDS
from hpc_serve.rendezvous.record import LOAD_ADAPTER, UNLOAD_ADAPTER, Adapter
from hpc_serve.vllm.log import is_decoder_note, is_idle_report

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
                self._keeper.set_phrase(f"loading adapter {name}")
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
            return f"the engine did not answer: {error_text(error)}"

    def _wanted(self) -> dict[str, Adapter] | None:
        """Return what is wanted; None while nothing has changed, or cannot be read."""
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            wanted = read_wanted(self._keeper.store, self._keeper.record.service)
        except (OSError, RendezvousError):
            return None
        self._seen = seen
        return dict(wanted.adapters) if wanted is not None else None


_INTERVAL_S = 1.5
_AFTER_SILENCE_S = 0.5
_LOOK_TIMEOUT_S = 2.0
# Seconds; after a longer time between two looks the launcher was suspended, and its engine perhaps too.
_LONGEST_INTERVAL_S = 12.0
_MOST_SILENCE_S = 10.0
_UNHEALTHY_LOOKS = 2
_IDLE_LOOKS = 2
_CANARY_TIMEOUT_S = 120.0
_CANARY_REST = 20.0  # so many times as long as a canary took, none follows: an idle engine is busy for 5 % at most
_ACCESS_LINE = re.compile(r':(\d+) - "(?:GET|POST) /')


class HealthAnswers:
    """The answers of one engine, and whether it is unresponsive by them. Times are seconds of one monotonic clock.

    An engine is unresponsive in three cases. It leaves /health unanswered for `limit_s` (10 s at most). It answers with
    an error twice in a row. Its gate says why the engine makes no step.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = min(limit_s, _MOST_SILENCE_S)
        self._looked_at_s = self._answered_at_s = self._found_at_s = now_s
        self._status: int | None = None
        self._errors = self._idle_looks = 0
        self._fault = ""
        self.complaint = ""
        """Why the engine is unresponsive; "" if it is not."""

    @property
    def complaint_s(self) -> float:
        """For how long it has been unresponsive."""
        return self._looked_at_s - self._found_at_s if self.complaint else 0.0

    @property
    def is_silent(self) -> bool:
        """Return whether the last look had no answer."""
        return self._answered_at_s < self._looked_at_s

    def note(self, seen: Look, now_s: float) -> None:
        """Take in a look that has ended now."""
        if now_s - self._looked_at_s > _LONGEST_INTERVAL_S:
            self._answered_at_s = self._found_at_s = now_s
        self._looked_at_s = now_s
        if seen.status is not None:
            self._answered_at_s, self._status = now_s, seen.status
            self._errors = 0 if seen.status == 200 else self._errors + 1
            self._fault = "" if seen.words is None or seen.words in ENGINE_WORDS else seen.words
            self._idle_looks = 0 if seen.words in ("busy", "paused", None) else self._idle_looks + 1
        complaint = self._find()
        if complaint and not self.complaint:
            self._found_at_s = now_s
        self.complaint = complaint

    def takes_canary(self) -> bool:
        """Return whether to ask for a token now: at every second look at an engine that makes no step."""
        is_time = self._idle_looks >= _IDLE_LOOKS
        self._idle_looks *= not is_time
        return is_time

    def _find(self) -> str:
        silent_s = self._looked_at_s - self._answered_at_s
        if silent_s >= self._limit_s:
            return f"its engine has left /health unanswered for {silent_s:.0f} s"
        if self._errors >= _UNHEALTHY_LOOKS:
            return f"its engine's /health answers {self._status}"
        return self._fault


@dataclass(kw_only=True)
class EngineWatch:
    """The watch of one engine from its readiness on. `request` is the first request that the engine answered, and is
    sent again.

    After `limit_s` seconds without an answer the engine is unresponsive, and after `give_up_s` more seconds it is given
    up. If `limit_s` is 0, nothing is asked; what another node has found still counts.
    """

    address: EngineAddress
    request: SmallRequest
    limit_s: float
    give_up_s: float
    keeper: RecordKeeper
    interval_s: float = _INTERVAL_S
    look_timeout_s: float = _LOOK_TIMEOUT_S
    began_at_s: float = field(default_factory=time.monotonic, init=False)
    fault: str = field(default="", init=False)
    """What another node has found of the engine's processes there; the engine is then given up."""
    _next_canary_s: float = field(default=float("-inf"), init=False)

    async def run(self) -> str:
        """Ask until cancelled, or until the engine is given up; returns why it is.

        An engine that drains is asked nothing.
        """
        answers = HealthAnswers(self.limit_s, time.monotonic())
        canary = threading.Thread()
        while True:
            await asyncio.sleep(min(self.interval_s, _AFTER_SILENCE_S) if answers.is_silent else self.interval_s)
            if self.fault:
                return f"was given up: {self.fault}"
            if self.keeper.record.state not in ("ready", "unresponsive"):
                await asyncio.Event().wait()
            if self.limit_s <= 0:
                continue
            seen = await asyncio.to_thread(look, self.address, timeout_s=self.look_timeout_s)
            answers.note(seen, time.monotonic())
            self._publish(answers.complaint)
            if answers.takes_canary() and not canary.is_alive() and time.monotonic() >= self._next_canary_s:
                # A daemon: the end of the program does not wait for its answer.
                canary = threading.Thread(target=self._ask_for_a_token, daemon=True, name="hpc-serve-canary")
                canary.start()
            if answers.complaint and answers.complaint_s >= self.give_up_s:
                return f"was unresponsive for {answers.complaint_s:.0f} s: {answers.complaint}"

    async def follow_weights(self) -> None:
        """Write in the record what the engine calls its weights, until cancelled or it has no such route."""
        version: str | None = self.keeper.record.weight_version
        while version is not None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                version = await asyncio.to_thread(read_weight_version, self.address)
            self.keeper.update(weight_version=version or "")
            await asyncio.sleep(self.interval_s)

    def is_noise(self, line: str) -> bool:
        """Return whether a line of the engine's log tells of nothing but what this watch has asked."""
        found = _ACCESS_LINE.search(line)
        if found is not None and int(found[1]) in self.address.own_ports:
            return True
        return self.limit_s > 0 and (is_idle_report(line) or is_decoder_note(line))

    def _ask_for_a_token(self) -> None:
        """Give the engine something to do; its gate sees whether it does it. What takes long is asked seldom."""
        began_s = time.monotonic()
        with contextlib.suppress(Exception):
            ask(self.address, self.request, timeout_s=_CANARY_TIMEOUT_S)
        self._next_canary_s = time.monotonic() + _CANARY_REST * (time.monotonic() - began_s)

    def _publish(self, complaint: str) -> None:
        state = self.keeper.record.state
        if complaint and state == "ready":
            _log.warning("unresponsive: %s", complaint)
            self.keeper.update(state="unresponsive", stage="unresponsive", reason=complaint)
        elif not complaint and state == "unresponsive":
            _log.info("the engine answers again")
            self.keeper.update(state="ready", stage="ready", reason=None)
