"""Looks after an engine that was ready: asks whether it still answers, and writes in the record when it does not.

What the answers mean is decided in `canary`. How often it asks is decided there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hpc_serve.job.engine.canary import EngineJudge
from hpc_serve.job.engine.health import EngineAddress, SmallRequest, ask, look
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.vllm.log import is_idle_report

T = TypeVar("T")

_log = logging.getLogger(__name__)
# A canary that waits for longer is given up; the engine's verdict does not wait for that.
_CANARY_TIMEOUT_S = 120.0
_ACCESS_LINE = re.compile(r':(\d+) - "(?:GET|POST) /')
_PORTS_REMEMBERED = 64


@dataclass(kw_only=True)
class EngineWatch:
    """The watch of one engine from its readiness on. `request` is what it answered first, and is asked again.

    Without an answer for `limit_s` seconds the engine is unresponsive, and after `give_up_s` seconds of that it is
    given up. With `limit_s` 0 nobody asks.
    """

    address: EngineAddress
    request: SmallRequest
    limit_s: float
    give_up_s: float
    keeper: RecordKeeper
    began_at_s: float = field(default_factory=time.monotonic, init=False)
    _ports: deque[int] = field(default_factory=lambda: deque(maxlen=_PORTS_REMEMBERED), init=False)

    async def run(self) -> str:
        """Ask until cancelled, or until the engine is given up; returns why it is.

        An engine that drains is asked nothing.
        """
        judge = EngineJudge(self.limit_s, time.monotonic())
        while True:
            await asyncio.sleep(judge.next_look_s)
            if self.limit_s <= 0 or self.keeper.record.state not in ("ready", "unresponsive"):
                await asyncio.Event().wait()
            seen = await asyncio.to_thread(look, self.address, self._ports.append)
            judge.note(seen, time.monotonic())
            self._publish(judge.complaint)
            if judge.wants_canary:
                self._send_canary(judge)
            if judge.complaint and judge.complaint_s >= self.give_up_s:
                return f"was unresponsive for {judge.complaint_s:.0f} s: {judge.complaint}"

    def is_noise(self, line: str) -> bool:
        """Whether a line of the engine's log tells of nothing but what this watch has asked."""
        found = _ACCESS_LINE.search(line)
        return (found is not None and int(found[1]) in self._ports) or (self.limit_s > 0 and is_idle_report(line))

    def _send_canary(self, judge: EngineJudge) -> None:
        def note(answer: asyncio.Future[int]) -> None:
            if answer.exception() is not None:
                judge.note_canary_lost()
            elif answer.result() == 200:
                judge.note_canary_answered(time.monotonic())
            else:
                judge.note_canary_refused(time.monotonic())
            self._publish(judge.complaint)

        judge.note_canary_sent(time.monotonic())
        _in_thread(
            lambda: ask(self.address, self.request, timeout_s=_CANARY_TIMEOUT_S, tell_port=self._ports.append)
        ).add_done_callback(note)

    def _publish(self, complaint: str) -> None:
        state = self.keeper.record.state
        if complaint and state == "ready":
            _log.warning("unresponsive: %s", complaint)
            self.keeper.update(state="unresponsive", stage="unresponsive", reason=complaint)
        elif not complaint and state == "unresponsive":
            _log.info("the engine answers again")
            self.keeper.update(state="ready", stage="ready", reason=None)


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `call`, which may take long: the end of the program does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            _tell(future.set_exception, error)
        else:
            _tell(future.set_result, result)

    def _tell(tell: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the program ends, and its loop is closed
            loop.call_soon_threadsafe(lambda: None if future.done() else tell(value))

    threading.Thread(target=run, daemon=True, name="hpc-serve-canary").start()
    return future
