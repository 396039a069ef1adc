"""The control connection between the head's launcher and the launcher of each other node.

There is one TCP connection for each node, with one JSON object on each line. Both ends first prove that they hold the
run's token, without sending it. Both ends send heartbeats. A launcher that ends closes its connection; one that hangs
stops sending heartbeats. What the messages cause is decided by `parts` (head) and `worker` (other nodes).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.network import PortsInUseError

_MAX_HEARTBEAT_INTERVAL_S = 3.0
_HEARTBEATS_PER_SILENCE = 20
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 256 * 1024
_MAX_HELLO_TEXT = 256
# Connections that have not proved the token yet, beside one for each node.
_SPARE_HANDSHAKES = 64
_RETRY_INTERVAL_S = 0.2
_MAX_WRONG_ANSWERS = 3

Message = dict[str, Any]


class LinkLostError(HpcServeError):
    """The launcher at the other end has ended, or its node has stopped answering."""


class Link:
    """One end of an open connection.

    `rank`, `name` and `address` describe the node at the other end. `read_bytes` is what that node's processes had
    read by its latest heartbeat. The node counts as lost after `silence_s` seconds without a message.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        rank: int,
        name: str,
        address: str,
        silence_s: float,
    ) -> None:
        self.rank, self.name, self.address = rank, name, address
        self._silence_s = silence_s
        self.read_bytes = 0
        self._reader, self._writer = reader, writer

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a message. A closed connection raises nothing here; `receive` reports it."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
            await self._writer.drain()

    async def receive(self) -> Message:
        """The next message that is not a heartbeat.

        Raises LinkLostError if the connection ends, or if nothing arrives for `silence_s` seconds.
        """
        while True:
            try:
                message = await self._next_message()
            except asyncio.TimeoutError as error:
                raise LinkLostError(f"node {self.name} has sent nothing for {self._silence_s:g} s") from error
            except (OSError, ValueError, EOFError) as error:
                raise LinkLostError(f"the launcher on node {self.name} ended") from error
            if message.get("kind") != "heartbeat":
                return message
            self.read_bytes = _whole_number(message.get("read_bytes", 0))

    async def _next_message(self) -> Message:
        """The next message. Raises asyncio.TimeoutError after `silence_s` seconds without one.

        The wait is a sequence of short ones. Slurm may suspend the whole job for longer than `silence_s`: then both
        ends stand still, only one of the short waits runs out, and the other node still has time to send.
        """
        reading = asyncio.ensure_future(_read(self._reader))
        try:
            for _ in range(_HEARTBEATS_PER_SILENCE):
                await asyncio.wait({reading}, timeout=self._silence_s / _HEARTBEATS_PER_SILENCE)
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()
        raise asyncio.TimeoutError

    async def send_heartbeats(self, read_bytes: Callable[[], int]) -> None:
        """Send heartbeats until cancelled. Each carries the latest result of `read_bytes`.

        `read_bytes` runs in a thread and may take long: /proc is slow for a process that is mapping much memory.
        Heartbeats do not wait for it.
        """
        interval_s = min(_MAX_HEARTBEAT_INTERVAL_S, self._silence_s / _HEARTBEATS_PER_SILENCE)
        latest, reading = 0, asyncio.create_task(asyncio.to_thread(read_bytes))
        while True:
            await asyncio.wait({reading}, timeout=interval_s)
            if reading.done():
                latest, reading = reading.result(), asyncio.create_task(asyncio.to_thread(read_bytes))
            await self.send("heartbeat", read_bytes=latest)
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1)


class ControlServer:
    """The head's end: accepts launchers that hold the token, and calls `on_link` with the connection of each.

    Anybody can connect to it. A connection has _HANDSHAKE_TIMEOUT_S to prove the token, and there are never more than
    `num_nodes` and a few of them at a time, so that they take neither memory nor the launcher's open files. One that is
    too many costs a connection of the source address that has most of them. Chance chooses which one, so that a node
    beside a stranger of the same address comes in after some tries.
    """

    def __init__(
        self, token: str, name: str, on_link: Callable[[Link], None], *, silence_s: float, num_nodes: int = 1
    ) -> None:
        self._token, self._name, self._on_link = token.encode(), name, on_link
        self._silence_s = silence_s
        self._max_handshakes = num_nodes + _SPARE_HANDSHAKES
        self._handshakes: dict[asyncio.StreamWriter, str] = {}  # with the source address of each
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_MAX_MESSAGE_BYTES)

    def close(self) -> None:
        """Take no further connection. Those of launchers stay open."""
        if self._server is not None:
            self._server.close()
        for writer in self._handshakes:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handshakes[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        if len(self._handshakes) > self._max_handshakes:
            dropped = self._choose_dropped()
            del self._handshakes[dropped]
            dropped.transport.abort()
        try:
            link = await asyncio.wait_for(self._handshake(reader, writer), _HANDSHAKE_TIMEOUT_S)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError):
            writer.transport.abort()  # without the token; it was sent a nonce and nothing else
            return
        finally:
            self._handshakes.pop(writer, None)
        self._on_link(link)

    def _choose_dropped(self) -> asyncio.StreamWriter:
        numbers = Counter(self._handshakes.values())
        most = max(numbers.values())
        return random.choice([writer for writer, source in self._handshakes.items() if numbers[source] == most])

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        ours = secrets.token_hex(16)
        await _write(writer, {"hpc_serve": 1, "nonce": ours})
        hello = await _read(reader)
        if not _is_proof(hello, _proof(self._token, "node", ours)):
            raise ValueError("wrong token")
        link = Link(
            reader,
            writer,
            rank=_whole_number(hello.get("rank")),
            name=_text(hello, "name"),
            address=_text(hello, "address"),
            silence_s=self._silence_s,
        )
        proof = _proof(self._token, "head", _text(hello, "nonce"))
        await _write(writer, {"proof": proof, "name": self._name, "silence_s": self._silence_s})
        return link


async def connect(
    head: tuple[str, int], token: str, *, rank: int, name: str, own_address: Callable[[], str], deadline_s: float
) -> Link:
    """Connect to the head's launcher, and poll until it listens.

    A handshake that was cut off is tried again: strangers who hold many connections can crowd out a node's.
    `own_address` is called after the head was reached, because the answer depends on the route to it. Raises
    LinkLostError if the head is not reached within `deadline_s` seconds. Raises PortsInUseError if another program
    answers on the head's port: at once after a few wrong answers, at the deadline if what answers proves nothing.
    """
    deadline = time.monotonic() + deadline_s
    wrong_answers = 0
    while True:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(*head, limit=_MAX_MESSAGE_BYTES), timeout=_HANDSHAKE_TIMEOUT_S
            )
            handshake = _handshake_with_head(reader, writer, token.encode(), rank, name, head, own_address())
            return await asyncio.wait_for(handshake, _HANDSHAKE_TIMEOUT_S)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
            if writer is not None:
                writer.transport.abort()
            wrong_answers += isinstance(error, ValueError)
            is_late = time.monotonic() > deadline
            if wrong_answers == _MAX_WRONG_ANSWERS or (is_late and writer is not None):
                raise PortsInUseError(
                    f"A program other than the head's launcher answers at {head[0]}:{head[1]}."
                ) from error
            if is_late:
                raise LinkLostError(
                    f"node {name} cannot reach the head's launcher at {head[0]}:{head[1]} "
                    f"after {deadline_s:.0f} s ({error}); if the nodes have several networks, "
                    "name the one to use in HPC_SERVE_INTERFACE"
                ) from error
        await asyncio.sleep(_RETRY_INTERVAL_S)


async def _handshake_with_head(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: bytes,
    rank: int,
    name: str,
    head: tuple[str, int],
    address: str,
) -> Link:
    greeting = await _read(reader)
    ours = secrets.token_hex(16)
    hello = {"rank": rank, "name": name, "address": address, "nonce": ours}
    await _write(writer, hello | {"proof": _proof(token, "node", _text(greeting, "nonce"))})
    answer = await _read(reader)
    if not _is_proof(answer, _proof(token, "head", ours)):
        raise ValueError("wrong token")
    silence_s = answer.get("silence_s")  # the head's value: both ends wait equally long
    if not isinstance(silence_s, int | float):
        raise ValueError("no silence_s")
    return Link(reader, writer, rank=0, name=_text(answer, "name"), address=head[0], silence_s=silence_s)


def _proof(token: bytes, role: str, nonce: str) -> str:
    return hmac.new(token, f"{role}:{nonce}".encode(), "sha256").hexdigest()


def _is_proof(message: Message, expected: str) -> bool:
    return hmac.compare_digest(_text(message, "proof").encode(), expected.encode())


def _text(message: Message, name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > _MAX_HELLO_TEXT or not value.isprintable():
        raise ValueError(f"{name} is no text")
    return value


def _whole_number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("no whole number")
    return value


async def _read(reader: asyncio.StreamReader) -> Message:
    """The next line as a JSON object. Raises EOFError at the end, ValueError for anything else, OSError."""
    line = await reader.readline()
    if not line:
        raise EOFError
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
