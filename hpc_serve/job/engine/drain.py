"""How a replica drains: new requests are refused, those under way are finished, and both are bounded.

The head decides when, and takes the run down afterwards. What Slurm leaves after a signal is decided in `parts`.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_serve.job.engine.health import EngineAddress, requests_under_way
from hpc_serve.job.machine.process import Child
from hpc_serve.job.run.parts import Outcome, RunEnd
from hpc_serve.job.run.record_keeper import RecordKeeper
from hpc_serve.rendezvous.store import DrainRequest, read_drain_request
from hpc_serve.units import number_of

_log = logging.getLogger(__name__)
_REQUEST_INTERVAL_S = 1.0
_LOOK_INTERVAL_S = 0.5
# A request may have passed the gate and not be in the engine's figures yet.
_IDLE_LOOKS = 2
# In the reason of a failure during a drain.
WHILE_IT_DRAINED = "while it drained"


async def follow_drain_requests(path: Path, run_end: RunEnd) -> None:
    """End the run, after a drain, when somebody asks for it in the file `path`; at once when no time is left for it."""
    before: DrainRequest | None = None
    followed: DrainRequest | None = None
    while True:
        request = await asyncio.to_thread(read_drain_request, path)
        # A file that is being written is whole at the next look.
        is_whole = request is not None and (request.cause != "unknown" or request == before)
        before = request
        if request is not None and is_whole and request != followed:
            followed = request
            run_end.stop(request.by, drain_s=request.deadline_s, cause=request.cause)
        await asyncio.sleep(_REQUEST_INTERVAL_S)


@dataclass(kw_only=True)
class Drain:
    """One drain of one engine. `gate_file` makes the gate refuse new requests."""

    engine: Child
    address: EngineAddress
    gate_file: Path
    keeper: RecordKeeper
    run_end: RunEnd
    _most: int | None = field(default=None, init=False)
    _left: int | None = field(default=None, init=False)
    _ends_by_itself: bool = field(default=False, init=False)

    async def run(self, stop: Outcome) -> Outcome:
        """Drain for `stop.drain_s` seconds at most; returns how the run ended."""
        _log.info("draining for %.0f s at most: %s", stop.drain_s, stop.reason)
        self._ends_by_itself = self.run_end.was_signalled  # Slurm has signalled the engine as well
        self.keeper.update(
            state="draining",
            stage="finishing requests",
            progress=None,
            reason=stop.reason,
            drain_cause=stop.drain_cause,
        )
        try:
            self.gate_file.touch()
        except OSError as error:  # others may have filled the node's /tmp; clients leave a record that is draining
            _log.warning("the engine goes on taking requests while it drains: %s", error)
        began = time.monotonic()
        finishing = asyncio.create_task(self._finish())
        failure = await self.run_end.wait_for_interruption(finishing, within_s=stop.drain_s)
        has_finished = finishing.done() and finishing.exception() is None
        finishing.cancel()
        if has_finished or (self.engine.exit_code == 0 and time.monotonic() - began < stop.drain_s - 1):
            self._left = 0
        elif failure is not None and not (self._ends_by_itself or self.run_end.was_signalled):
            return replace(failure, reason=f"{failure.reason}, {WHILE_IT_DRAINED} ({stop.reason}); {self._sentence()}")
        return replace(stop, reason=f"{stop.reason}; {self._sentence()}")

    async def _finish(self) -> None:
        """Return when no request is under way any more."""
        idle_looks = 0
        while idle_looks < _IDLE_LOOKS:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                found = await asyncio.to_thread(requests_under_way, self.address)
            except (OSError, http.client.HTTPException):  # not known is not idle
                idle_looks = 0
                continue
            if found is None:
                await self._let_engine_finish()
                return
            if found != self._left:
                self.keeper.set_phrase(f"finishing {number_of(found, 'request')}")
            self._left, self._most = found, max(found, self._most or 0)
            idle_looks = idle_looks + 1 if found == 0 else 0

    async def _let_engine_finish(self) -> None:
        """Without figures only the engine knows: it ends after its requests, within its --shutdown-timeout."""
        self._ends_by_itself = True
        self.engine.terminate()
        await self.engine.wait()

    def _sentence(self) -> str:
        if self._most is None:
            return "the engine did not say how many requests were under way"
        if self._most == 0:
            return "no request was under way"
        if not self._left:
            return f"{number_of(self._most, 'request')} under way finished"
        return f"of {number_of(self._most, 'request')} under way {self._left} did not finish in time"
