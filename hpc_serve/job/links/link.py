"""A connection between the launchers of two nodes, from the ticket on its first line to its end.

A `Link` carries one JSON object on each line, and heartbeats both ways: a launcher that ends closes its connection, one
that hangs stops sending heartbeats. `control` and `worker` decide what messages cause.

Anybody can connect to a port. `Admission` reads what has come with a connection, and closes it at once if that is no
ticket, made with the run's token. So strangers take no place, no time and no memory. The ticket's nonce is the question
that the answering side proves itself by. A ticket counts once: who has read one on the network gains nothing by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.given_files import parse_json
from hpc_serve.job.progress import ReadSoFar

MAX_MESSAGE_BYTES = 256 * 1024
MAX_TEXT = 256
_MAX_HEARTBEAT_INTERVAL_S = 3.0
_HEARTBEATS_PER_SILENCE = 20

Message = dict[str, Any]


class LinkLostError(HpcServeError):
    """The launcher at the other end has ended, or its node has stopped answering."""


@dataclass(eq=False)
class Link:
    """One end of an open connection.

    `rank`, `name` and `address` describe the node at the other end; `cache` is its folder of caches, if it has one that
    outlives the run. `read` is what that node's processes had read by its latest heartbeat. The node counts as lost
    after `silence_s` seconds without a message.
    """

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _: KW_ONLY
    rank: int
    name: str
    address: str
    silence_s: float
    cache: str = ""
    read: ReadSoFar = field(default_factory=ReadSoFar, init=False)
    _answers: dict[str, asyncio.Future[Message]] = field(default_factory=dict, init=False)

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a message. A closed connection raises nothing here; `receive` reports it."""
        with contextlib.suppress(OSError):
            await write_message(self._writer, {"kind": kind, **fields})

    async def ask(self, kind: str, **fields: Any) -> Message:
        """Send a message, and return the other end's answer to it. It comes while somebody receives."""
        self._answers[kind] = answer = asyncio.Future[Message]()
        await self.send(kind, **fields)
        return await answer

    async def answer(self, question: Message, **fields: Any) -> None:
        """Answer a message of `ask`."""
        await self.send("answer", to=question["kind"], **fields)

    async def receive(self) -> Message:
        """Return the next message that is neither a heartbeat nor an answer.

        Raises LinkLostError if the connection ends, or if nothing arrives for `silence_s` seconds.
        """
        while True:
            try:
                message = await self._next_message()
            except asyncio.TimeoutError as error:
                raise LinkLostError(f"node {self.name} has sent nothing for {self.silence_s:g} s") from error
            except (OSError, ValueError, EOFError) as error:
                raise LinkLostError(f"the launcher on node {self.name} ended") from error
            if message.get("kind") == "heartbeat":
                self.read = _read_so_far(message.get("read", [0, 0, 0]))
            elif message.get("kind") != "answer":
                return message
            elif (asked := self._answers.pop(str(message.get("to")), None)) is not None and not asked.done():
                asked.set_result(message)

    async def _next_message(self) -> Message:
        """Return the next message. Raises asyncio.TimeoutError after `silence_s` seconds without one.

        The wait is a sequence of short ones. Slurm may suspend the whole job for longer than `silence_s`: then both
        ends stand still, only one of the short waits runs out, and the other node still has time to send.
        """
        reading = asyncio.ensure_future(read_message(self._reader))
        try:
            for _ in range(_HEARTBEATS_PER_SILENCE):
                await asyncio.wait({reading}, timeout=self.silence_s / _HEARTBEATS_PER_SILENCE)
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()
        raise asyncio.TimeoutError

    async def send_heartbeats(self, look: Callable[[], ReadSoFar]) -> None:
        """Send heartbeats until cancelled. Each carries the latest result of `look`.

        `look` runs in a thread and may take long: /proc is slow for a process that is mapping much memory.
        Heartbeats do not wait for it.
        """
        interval_s = min(_MAX_HEARTBEAT_INTERVAL_S, self.silence_s / _HEARTBEATS_PER_SILENCE)
        latest, reading = ReadSoFar(), asyncio.create_task(asyncio.to_thread(look))
        while True:
            await asyncio.wait({reading}, timeout=interval_s)
            if reading.done():
                latest, reading = reading.result(), asyncio.create_task(asyncio.to_thread(look))
            await self.send("heartbeat", read=latest)
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1)


def whole_number(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("no whole number")
    return value


def text(message: Message, name: str) -> str:
    """Return a short printable text of a message. Raises ValueError."""
    value = message.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} is no text")
    return value


def _read_so_far(value: object) -> ReadSoFar:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("no three numbers")
    return ReadSoFar(*map(whole_number, value))


async def read_message(reader: asyncio.StreamReader) -> Message:
    """Return the next line as a JSON object. Raises EOFError at the end, ValueError for anything else, OSError."""
    line = await reader.readline()
    if not line:
        raise EOFError
    message = parse_json(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


# -- admission to a port

_TICKET = re.compile(rb"hpc-serve ([0-9a-f]{32}) ([0-9a-f]{64})\n")
_TICKET_BYTES = len("hpc-serve ") + 32 + 1 + 64 + 1
# The kernel keeps a connection from us until something was sent on it, and forgets it after about so many seconds.
_FIRST_BYTES_S = 5
_NO_RESOURCES_PAUSE_S = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a refused connection leaves nothing behind in the kernel
_CLOSE_USUALLY = struct.pack("ii", 0, 0)


def proof(token: str, role: str, nonce: str) -> str:
    """Return what only a holder of the token can say in this role to whoever has chosen the nonce."""
    return hmac.new(token.encode(), f"{role}:{nonce}".encode(), "sha256").hexdigest()


def is_proof(message: Message, token: str, role: str, nonce: str) -> bool:
    """Return whether a message holds that proof. Raises ValueError if it holds none."""
    return hmac.compare_digest(text(message, "proof").encode(), proof(token, role, nonce).encode())


def make_ticket(token: str, nonce: str) -> bytes:
    """Return the first line on a connection."""
    return f"hpc-serve {nonce} {proof(token, 'ticket', nonce)}\n".encode()


def greeting(token: str, role: str, nonce: str, /, **fields: object) -> bytes:
    """Return the first line of the side that was connected to, in answer to a ticket with this nonce."""
    return json.dumps({"proof": proof(token, role, nonce), **fields}).encode() + b"\n"


async def open_with_ticket(
    address: tuple[str, int], token: str, role: str, *, within_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Message]:
    """Connect to a port that `Admission` guards; returns the connection and the greeting of whoever has this role.

    Raises OSError or asyncio.TimeoutError if nobody is reached. Raises EOFError if whoever is reached does not greet,
    ValueError for a wrong greeting. Each of the two steps may take `within_s` seconds.
    """
    nonce = secrets.token_hex(16)
    reader, writer = await asyncio.wait_for(_connect(address, make_ticket(token, nonce)), within_s)
    with aborted_on_error(writer):
        greeted = await asyncio.wait_for(read_message(reader), within_s)
        if not is_proof(greeted, token, role, nonce):
            raise ValueError(f"another program answers at {address[0]}:{address[1]}")
    return reader, writer, greeted


@contextlib.contextmanager
def aborted_on_error(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Abort a connection on any error. One of the network becomes EOFError: somebody was reached, and has gone."""
    try:
        yield
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, OSError | asyncio.TimeoutError):
            raise EOFError(str(error)) from error
        raise


async def _connect(address: tuple[str, int], ticket: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # The ticket travels with the packet that opens the connection.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, ticket)
        return await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
    except BaseException:
        connection.close()
        raise


class Admission:
    """Takes connections from `listener` until it is closed.

    It calls `on_admitted` in its thread with each that counts, and its nonce.
    """

    def __init__(self, listener: socket.socket, token: str, on_admitted: Callable[[socket.socket, str], None]) -> None:
        self._listener, self._token, self._on_admitted = listener, token, on_admitted
        self._used: set[str] = set()
        self._closed = threading.Event()
        listener.setblocking(True)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # inherited by each connection
        self._thread = threading.Thread(target=self._take_connections, name="control port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connection. Admitted connections stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends an accept() that waits
        self._thread.join()
        self._listener.close()

    def _take_connections(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:  # it was reset while it waited
                continue
            except OSError:  # closed, or no file or memory is left for now
                self._closed.wait(_NO_RESOURCES_PAUSE_S)
                continue
            if nonce := self._ticket_nonce(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_USUALLY)
                self._on_admitted(connection, nonce)
            else:
                connection.close()

    def _ticket_nonce(self, connection: socket.socket) -> str:
        """Return the nonce of the new ticket in the first bytes, "" if they are none.

        They are here by now, or never.
        """
        try:
            connection.setblocking(False)
            said = _TICKET.fullmatch(connection.recv(_TICKET_BYTES))
        except OSError:
            return ""
        nonce = said[1].decode() if said is not None else ""
        is_ticket = said is not None and hmac.compare_digest(said[2], proof(self._token, "ticket", nonce).encode())
        if not is_ticket or nonce in self._used:
            return ""
        self._used.add(nonce)
        return nonce
