"""The workers as the head sees them: a control connection to the launcher of each other node.

The end of one connection, or a failure that it reports, ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpc_serve.job.links.link import Link, LinkLostError, Message
from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.job.run.outcome import Outcome
from hpc_serve.job.run.parts import Parts, StopOrder

_log = logging.getLogger(__name__)
_WORKER_GRACE_S = 10.0


@dataclass(eq=False)
class WorkerLinks:
    """The connected workers of a job of `num_nodes` nodes. `on_join` is called with the link of each new one.

    `on_fault` gets what a worker says of the engine's processes on its node. Workers are told to stop at `stop_order`.
    """

    num_nodes: int
    _parts: Parts
    _on_join: Callable[[Link], None]
    _on_fault: Callable[[Link, Message], None] = lambda link, message: None
    stop_order: StopOrder = StopOrder.WORKERS
    _links: dict[int, Link] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._links)

    @property
    def absent_ranks(self) -> list[int]:
        """Return the ranks of the nodes without a connected launcher."""
        return sorted(set(range(1, self.num_nodes)) - set(self._links))

    @property
    def names(self) -> dict[str, str]:
        """Return the workers' node names, by address."""
        return {link.address: link.name for link in self._links.values()}

    @property
    def read(self) -> ReadSoFar:
        """Return the bytes that the run's processes on the other nodes have read so far."""
        return sum((link.read for link in self._links.values()), ReadSoFar())

    def add_worker(self, link: Link) -> None:
        """Take in a launcher that has connected. A rank that is unknown or taken is refused."""
        if link.rank not in self.absent_ranks:
            self._parts.run_in_background(link.close())
            return
        _log.info("node %s (%s) has joined", link.name, link.address)
        self._links[link.rank] = link
        self._parts.add(self.stop_order, functools.partial(self._stop, link))
        self._parts.run_in_background(link.send_heartbeats(ReadSoFar))
        self._parts.run_in_background(self._fail_with(link))
        self._on_join(link)

    def have_cache(self, path: str) -> bool:
        """Return whether every worker has the lock of this folder of caches on its own node."""
        return all(link.cache == path for link in self._links.values())

    async def tell_all(self, kind: str, **fields: Any) -> None:
        """Send a message to every worker."""
        for link in self._links.values():
            await link.send(kind, **fields)

    async def ask_all(self, kind: str, **fields: Any) -> None:
        """Have every worker do something, and wait until all have. One that fails ends the run."""
        await asyncio.gather(*(link.ask(kind, **fields) for link in self._links.values()))

    async def _fail_with(self, link: Link) -> None:
        """Wait until the worker reports a failure or is lost, and fail the run."""
        try:
            while (message := await link.receive()).get("kind") != "failed":
                self._on_fault(link, message)
            outcome = Outcome(
                failed_part=f"{message['part']} on {link.name}",
                reason=str(message["reason"]),
                exit_code=int(message["exit_code"]) or 1,
                last_log_lines=tuple(message["last_log_lines"]),
            )
        except LinkLostError as error:
            outcome = Outcome(failed_part=f"node {link.name}", reason=str(error), exit_code=1)
        await self._parts.run_end.fail(outcome)

    async def _stop(self, link: Link) -> None:
        """Tell a worker how the run ends, and wait until it has: a raylet that outlives the head's Ray needs long."""
        outcome = self._parts.run_end.outcome or Outcome(reason="the head ended the run", exit_code=0)
        await link.send("stop", reason=outcome.reason, failed_part=outcome.failed_part, exit_code=outcome.exit_code)
        with contextlib.suppress(LinkLostError, asyncio.TimeoutError):
            await asyncio.wait_for(_wait_for_end(link), _WORKER_GRACE_S)
        await link.close()


async def _wait_for_end(link: Link) -> None:
    """Receive until the worker has ended. It may still tell of ranks that end. Raises LinkLostError."""
    while True:
        await link.receive()
