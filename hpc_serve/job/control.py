"""The line between the head's launcher and the other nodes' launchers: who is there, what failed, when to go and stop.

One TCP connection a node, one JSON object a line, opened with a mutual proof that both hold the run's token (which
itself never travels). Its end is news: a launcher that dies closes it at once, a frozen one misses its beats.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.job.network import PortsInUseError

_LONGEST_BEAT_S = 3.0
_BEATS_TO_MISS = 20
_HANDSHAKE_S = 10.0
_LONGEST_MESSAGE = 256 * 1024

Message = dict[str, Any]


class LinkLostError(HpcServeError):
    """The launcher at the other end ended, or its node no longer answers."""


class Link:
    """One end of an open connection. `rank`, `name` and `address` are those of the node at the other end.

    That node is lost once it has been silent for `silence_s` seconds.
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
        """Send a message; a connection that is already gone is not an error here, `receive` tells it."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
            await self._writer.drain()

    async def receive(self) -> Message:
        """The next message other than a beat. Raises LinkLostError at the end, or when neither comes."""
        while True:
            try:
                message = await self._hear()
            except asyncio.TimeoutError as error:
                raise LinkLostError(f"node {self.name} has not been heard of for {self._silence_s:g} s") from error
            except (OSError, ValueError, EOFError) as error:
                raise LinkLostError(f"the launcher on node {self.name} ended") from error
            if message["kind"] != "beat":
                return message
            self.read_bytes = int(message.get("read_bytes", 0))

    async def _hear(self) -> Message:
        """The next message. Raises asyncio.TimeoutError after `silence_s` without any.

        That is waited for in short turns: to a job that was suspended as a whole, this end too, it was one of them.
        """
        reading = asyncio.ensure_future(_read(self._reader))
        try:
            for _ in range(_BEATS_TO_MISS):
                await asyncio.wait({reading}, timeout=self._silence_s / _BEATS_TO_MISS)
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()
        raise asyncio.TimeoutError

    async def beat(self, read_bytes: Callable[[], int]) -> None:
        """Send beats until cancelled; each tells how much this node's processes had read when last asked.

        Asking may take long (the kernel answers for a process that maps much memory when that is done); beats do not.
        """
        beat_s = min(_LONGEST_BEAT_S, self._silence_s / _BEATS_TO_MISS)
        answer, asking = 0, asyncio.create_task(asyncio.to_thread(read_bytes))
        while True:
            await asyncio.wait({asking}, timeout=beat_s)
            if asking.done():
                answer, asking = asking.result(), asyncio.create_task(asyncio.to_thread(read_bytes))
            await self.send("beat", read_bytes=answer)
            await asyncio.sleep(beat_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1)


class ControlServer:
    """The head's end: accepts the launchers that hold the token and calls `on_link` with each."""

    def __init__(self, token: str, name: str, on_link: Callable[[Link], None], *, silence_s: float) -> None:
        self._token, self._name, self._on_link = token.encode(), name, on_link
        self._silence_s = silence_s
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_LONGEST_MESSAGE)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link = await asyncio.wait_for(self._greet(reader, writer), _HANDSHAKE_S)
        except (OSError, ValueError, KeyError, TypeError, EOFError, asyncio.TimeoutError):
            writer.close()  # a stranger: nothing was told
            return
        self._on_link(link)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Link:
        ours = secrets.token_hex(16)
        await _write(writer, {"hpc_serve": 1, "nonce": ours})
        hello = await _read(reader)
        if not hmac.compare_digest(str(hello["proof"]), _proof(self._token, "node", ours)):
            raise ValueError("wrong token")
        proof = _proof(self._token, "head", str(hello["nonce"]))
        await _write(writer, {"proof": proof, "name": self._name, "silence_s": self._silence_s})
        who = {"name": str(hello["name"]), "address": str(hello["address"])}
        return Link(reader, writer, rank=int(hello["rank"]), silence_s=self._silence_s, **who)


async def connect(
    head: tuple[str, int], token: str, *, rank: int, name: str, own_address: Callable[[], str], deadline_s: float
) -> Link:
    """Reach the head's launcher, polling until it listens. `own_address` is asked for once the head's network is there.

    Raises LinkLostError after `deadline_s` seconds, PortsInUseError if another program answers on its port.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(*head, limit=_LONGEST_MESSAGE), timeout=_HANDSHAKE_S
            )
            break
        except (OSError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline:
                raise LinkLostError(
                    f"node {name} cannot reach the head's launcher at {head[0]}:{head[1]} "
                    f"after {deadline_s:.0f} s ({error}); if the nodes have several networks, "
                    "name the one to use in HPC_SERVE_INTERFACE"
                ) from error
            await asyncio.sleep(0.2)
    try:
        link = await asyncio.wait_for(
            _introduce(reader, writer, token.encode(), rank, name, head, own_address()), _HANDSHAKE_S
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, asyncio.TimeoutError) as error:
        writer.close()
        raise PortsInUseError(f"Another program than the head's launcher answers at {head[0]}:{head[1]}.") from error
    return link


async def _introduce(
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
    await _write(writer, hello | {"proof": _proof(token, "node", str(greeting["nonce"]))})
    answer = await _read(reader)
    if not hmac.compare_digest(str(answer["proof"]), _proof(token, "head", ours)):
        raise ValueError("wrong token")
    silence_s = float(answer["silence_s"])  # the head's, so that both ends wait as long
    return Link(reader, writer, rank=0, name=str(answer["name"]), address=head[0], silence_s=silence_s)


def _proof(token: bytes, role: str, nonce: str) -> str:
    return hmac.new(token, f"{role}:{nonce}".encode(), "sha256").hexdigest()


async def _read(reader: asyncio.StreamReader) -> Message:
    line = await reader.readline()
    if not line:
        raise EOFError
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
