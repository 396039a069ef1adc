"""How a run ended. It is decided once: the first cause counts, and what follows from it does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from hpc_serve.errors import HpcServeError

_log = logging.getLogger(__name__)

# Slurm signals every process of a step at once, so a child's end may be seen before our own signal.
_SETTLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a replica ended: stopped on purpose (`failed_part` is None), or the part that failed and its last lines."""

    reason: str
    exit_code: int
    failed_part: str | None = None
    last_log_lines: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return self.failed_part is not None


class PartFailedError(Exception):
    """A part of the replica failed. The error carries the outcome to report."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def failure(part: str, reason: str, *, exit_code: int = 1, last_log_lines: tuple[str, ...] = ()) -> PartFailedError:
    return PartFailedError(
        Outcome(reason=reason, exit_code=exit_code or 1, failed_part=part, last_log_lines=last_log_lines)
    )


class RunEnd:
    """The end of the run on this node. `stop` ends it on purpose, `fail` because a part failed."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._decided: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def stop_on_signals(self) -> None:
        """Stop at SIGTERM, which Slurm sends at scancel, preemption and the time limit, and at SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, f"{number.name} (cancelled, preempted, or out of time)")

    def stop(self, reason: str) -> None:
        self._stopped.set()
        self._decide(Outcome(reason=reason, exit_code=0))

    async def fail(self, outcome: Outcome) -> None:
        """Report a failure. It counts unless a stop follows within a second."""
        await self.wait_for_stop(_SETTLE_S)
        self._decide(outcome)

    async def fail_on_error(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, and report the error that ends it, if any, as the run's failure."""
        try:
            await work
        except PartFailedError as error:
            await self.fail(error.outcome)
        except HpcServeError as error:
            await self.fail(Outcome(failed_part="launcher", reason=str(error), exit_code=error.exit_code))
        except Exception as error:
            _log.exception("unexpected error")
            await self.fail(Outcome(failed_part="launcher", reason=f"{type(error).__name__}: {error}", exit_code=1))

    async def wait(self) -> Outcome:
        """Wait until the outcome is decided, and return it."""
        return await asyncio.shield(self._decided)

    async def wait_for_stop(self, timeout_s: float) -> None:
        """Return at a stop, even one that comes after a failure, or after `timeout_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), timeout_s)

    def _decide(self, outcome: Outcome) -> None:
        if not self._decided.done():
            self._decided.set_result(outcome)
