"""How a replica ended, decided once: the first cause counts, what it brings down after it does not."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

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
    """A part of the replica failed; carries the outcome to report."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


def failure(part: str, reason: str, *, exit_code: int = 1, last_log_lines: tuple[str, ...] = ()) -> PartFailedError:
    return PartFailedError(
        Outcome(reason=reason, exit_code=exit_code or 1, failed_part=part, last_log_lines=last_log_lines)
    )


class Ending:
    """The end that everybody waits for. `stop` is a wish from outside, `fail` a part's failure."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._decided: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def stop(self, reason: str) -> None:
        self._stop.set()
        self._decide(Outcome(reason=reason, exit_code=0))

    async def fail(self, outcome: Outcome) -> None:
        """Report a failure; it counts unless a stop arrives within a moment."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop.wait(), _SETTLE_S)
        self._decide(outcome)

    async def wait(self) -> Outcome:
        return await asyncio.shield(self._decided)

    def _decide(self, outcome: Outcome) -> None:
        if not self._decided.done():
            self._decided.set_result(outcome)
