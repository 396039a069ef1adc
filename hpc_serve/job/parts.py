"""The parts of a run as its head sees them: children on its own node, launchers on the others, and what ends them all.

Any part may end at any moment; the first to do so decides how the replica ended (`Ending`). What is started, and in
which order, is the head's business; the way down is the same from wherever it got to.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.control import Link, LinkLostError
from hpc_serve.job.node import Node
from hpc_serve.job.outcome import Ending, Outcome, PartFailedError, failure
from hpc_serve.job.process import Child, end_marked, read_bytes, start_child
from hpc_serve.job.record_keeper import RecordKeeper

_PORT_CLASH = re.compile(r"[Aa]ddress already in use|port .* is already (?:in use|used)|EADDRINUSE")
_ENGINE_GRACE_S = 10.0
_NODES_GRACE_S = 10.0
_RAY_GRACE_S = 4.0
_POLL_S = 0.5


class Parts:
    """What runs of a replica. `links` are the lines to the other nodes' launchers, by node rank."""

    def __init__(self, node: Node, keeper: RecordKeeper, ending: Ending) -> None:
        self.links: dict[int, Link] = {}
        self.news = asyncio.Event()
        self._node, self._keeper, self._ending = node, keeper, ending
        self._children: list[Child] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside everything else, until it is done or all is taken down."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`; its failure is the replica's."""
        try:
            await work
        except PartFailedError as error:
            await self._ending.fail(error.outcome)
        except HpcServeError as error:
            await self._ending.fail(Outcome(failed_part="launcher", reason=str(error), exit_code=error.exit_code))
        except Exception as error:
            traceback.print_exc()
            await self._ending.fail(
                Outcome(failed_part="launcher", reason=f"{type(error).__name__}: {error}", exit_code=1)
            )

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> Child:
        """Start a child on this node whose end is the replica's. Raises PartFailedError if there is no such command."""
        try:
            child = await start_child(name, argv, environ, on_line)
        except FileNotFoundError as error:
            raise failure(
                name, f"no command {error} in this environment: activate one that has it (HPC_SERVE_ENV)", exit_code=127
            ) from error
        self._children.append(child)
        self.spawn(self._watch(child))
        return child

    def welcome(self, link: Link) -> None:
        """Take in the launcher of another node; its end, too, is the replica's."""
        if not 0 < link.rank < self._node.allocation.num_nodes or link.rank in self.links:
            self.spawn(link.close())
            return
        print(f"hpc-serve: node {link.name} ({link.address}) is here", flush=True)
        self.links[link.rank] = link
        nodes = self._keeper.record.nodes
        self._keeper.update(nodes=(*nodes, type(nodes[0])(name=link.name, address=link.address)))
        self.news.set()
        self.spawn(link.send_heartbeats(lambda: 0))
        self.spawn(self._listen(link))

    async def until(self, missing: Callable[[], str | None], *, part: str, within_s: float) -> None:
        """Wait until nothing is missing; every change of what is missing starts the deadline anew.

        Raises PartFailedError.
        """
        before, since = missing(), time.monotonic()
        while before is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.news.wait(), _POLL_S)
            self.news.clear()
            now = missing()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > within_s:
                raise failure(part, f"{now} within {within_s:.0f} s")

    async def read_bytes(self) -> int:
        """What the run's processes have read so far, on all nodes: a load that moves shows here."""
        here = await asyncio.to_thread(read_bytes, self._node.mark)
        return here + sum(link.read_bytes for link in self.links.values())

    async def take_down(self) -> None:
        """End everything: the engine, the other nodes' parts, Ray, and what any of them left."""
        for task in self._tasks:
            task.cancel()
        engines = [child for child in self._children if child.name == "engine"]
        others = [child for child in self._children if child.name != "engine"]
        await asyncio.gather(*(child.stop(_ENGINE_GRACE_S) for child in engines))
        await asyncio.gather(*(_dismiss(link) for link in self.links.values()))
        await asyncio.gather(*(child.stop(_RAY_GRACE_S) for child in others))
        await end_marked(self._node.mark, grace_s=1)

    async def _listen(self, link: Link) -> None:
        try:
            message = await link.receive()
            outcome = Outcome(
                failed_part=f"{message['part']} on {link.name}",
                reason=str(message["reason"]),
                exit_code=int(message["exit_code"]) or 1,
                last_log_lines=tuple(message["last_log_lines"]),
            )
        except LinkLostError as error:
            outcome = Outcome(failed_part=f"node {link.name}", reason=str(error), exit_code=1)
        await self._ending.fail(outcome)

    async def _watch(self, child: Child) -> None:
        code = await child.wait()
        words = tuple(child.last_log_lines)
        reason = child.epitaph
        if self._keeper.record.state == "starting" and any(_PORT_CLASH.search(line) for line in words):
            code, reason = 75, f"{reason}: a port was taken"
        await self._ending.fail(
            Outcome(failed_part=child.name, reason=reason, exit_code=code or 1, last_log_lines=words)
        )


async def _dismiss(link: Link) -> None:
    """Send a worker home and wait until it has ended its part: a raylet that outlives its head lingers."""
    await link.send("stop")
    with contextlib.suppress(LinkLostError, asyncio.TimeoutError):
        await asyncio.wait_for(link.receive(), _NODES_GRACE_S)
    await link.close()
