"""How the launchers of a job find each other, and the workers as the head sees them.

The head listens on its control port, and the others connect. The first line on a connection is a ticket (`Admission`),
without which the head does not look at it. The head answers with a proof that it holds the run's token, and with a
nonce. The node answers with its own proof, and says who it is. The head answers with what both use. The token is not
sent. What is left is a `Link`. The end of one link, or a failure that a worker reports, ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_serve.job.links.link import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    Admission,
    Link,
    LinkLostError,
    Message,
    aborted_on_error,
    greeting,
    is_proof,
    open_with_ticket,
    proof,
    read_message,
    text,
    whole_number,
    write_message,
)
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.job.progress import ReadSoFar
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Outcome, Parts, StopOrder, told_outcome

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
            told = told_outcome(message)
            outcome = replace(told, failed_part=f"{told.failed_part} on {link.name}")
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


_HANDSHAKE_TIMEOUT_S = 10.0
_RETRY_INTERVAL_S = 0.2
# Strangers may keep the kernel or the head busy: a new try then comes in sooner than an old one.
_TRY_S = 3.0
_MAX_WRONG_ANSWERS = 3


class ControlServer:
    """The end of the head's `node`, until `close`: accepts launchers from `listener` that hold the token.

    It calls `on_link` with the connection of each.

    Anybody can connect to it. A connection without a ticket of its own is closed at once (`Admission`). Another one has
    _HANDSHAKE_TIMEOUT_S for its proof.
    """

    def __init__(self, node: Node, listener: socket.socket, on_link: Callable[[Link], None]) -> None:
        self._node, self._on_link = node, on_link
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        loop = asyncio.get_running_loop()

        def admit(connection: socket.socket, nonce: str) -> None:
            try:
                loop.call_soon_threadsafe(self._admit, connection, nonce)
            except RuntimeError:  # the launcher has ended
                connection.close()

        self._admission = Admission(listener, node.token, admit)

    def close(self) -> None:
        """Take no further connection. The connections of launchers stay open."""
        self._is_closed = True
        self._admission.close()
        for handshake in [*self._handshakes]:
            handshake.cancel()

    def _admit(self, connection: socket.socket, nonce: str) -> None:
        if self._is_closed:
            connection.close()
            return
        handshake = asyncio.ensure_future(self._open(connection, nonce))
        self._handshakes.add(handshake)
        handshake.add_done_callback(functools.partial(self._forget, connection))

    def _forget(self, connection: socket.socket, handshake: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        if handshake.cancelled():  # before it began
            connection.close()

    async def _open(self, connection: socket.socket, nonce: str) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
        except (OSError, asyncio.CancelledError):
            connection.close()
            return
        try:
            link = await asyncio.wait_for(self._handshake(reader, writer, nonce), _HANDSHAKE_TIMEOUT_S)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self._on_link(link)

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonce: str) -> Link:
        node, ours = self._node, secrets.token_hex(16)
        writer.write(greeting(node.token, "head", nonce, nonce=ours))
        await writer.drain()
        hello = await read_message(reader)
        if not is_proof(hello, node.token, "node", ours):
            raise ValueError("wrong token")
        link = Link(
            reader,
            writer,
            rank=whole_number(hello.get("rank")),
            name=text(hello, "name"),
            address=text(hello, "address"),
            silence_s=node.options.silence_s,
            cache=text(hello, "cache"),
        )
        await write_message(writer, {"name": node.allocation.node_name, "silence_s": node.options.silence_s})
        return link


async def connect(node: Node, port: int) -> Link:
    """Connect to the launcher of the node's head, and try until it listens.

    Connections are slow when strangers open many. So several tries run at once, and the first that the head greets goes
    on. Raises LinkLostError if the head is not reached within `join_s` seconds. Raises PortsInUseError if another
    program answers on the head's port: at once after a few wrong answers, at the deadline if what answers proves
    nothing.
    """
    join_s = node.options.join_s
    deadline = time.monotonic() + join_s
    wrong_answers = 0
    while True:
        try:
            return await _try_to_connect(node, port)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError) as caught:
            error = caught
        wrong_answers += isinstance(error, ValueError)
        is_late = time.monotonic() > deadline
        if wrong_answers >= _MAX_WRONG_ANSWERS or (is_late and isinstance(error, ValueError | EOFError)):
            raise PortsInUseError(f"A program other than the head's launcher answers at {node.head}:{port}.") from error
        if is_late:
            raise LinkLostError(
                f"node {node.allocation.node_name} cannot reach the head's launcher at {node.head}:{port} after "
                f"{join_s:.0f} s ({str(error) or 'no answer'}); if the nodes have several networks, name the one to "
                "use in HPC_SERVE_INTERFACE"
            ) from error
        await asyncio.sleep(_RETRY_INTERVAL_S)


async def _try_to_connect(node: Node, port: int) -> Link:
    """Try once to connect, and return the link. Raises what `open_with_ticket` raises."""
    reader, writer, greeted = await open_with_ticket((node.head, port), node.token, "head", within_s=_TRY_S)
    with aborted_on_error(writer):
        hello = {
            "rank": node.allocation.node_rank,
            "name": node.allocation.node_name,
            "address": node.address,  # not before the head was reached: it depends on the route
            "cache": str(node.cache.path)[:MAX_TEXT] if node.cache.lock is not None else "",
            "proof": proof(node.token, "node", text(greeted, "nonce")),
        }
        await write_message(writer, hello)
        answer = await asyncio.wait_for(read_message(reader), _HANDSHAKE_TIMEOUT_S)
        silence_s = answer.get("silence_s")  # the head's value: both ends wait equally long
        if not isinstance(silence_s, int | float):
            raise ValueError("no silence_s")
        return Link(reader, writer, rank=0, name=text(answer, "name"), address=node.head, silence_s=silence_s)
