"""An open connection between the launchers of two nodes: one JSON object on each line, and heartbeats both ways.

A launcher that ends closes its connection; one that hangs stops sending heartbeats. How a connection is made is
decided by `control`; what the messages cause by `worker_links` (head) and `worker` (other nodes).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from hpc_serve.errors import HpcServeError
from hpc_serve.given_files import parse_json
from hpc_serve.job.progress.reading import ReadSoFar

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
    outlives the run. `read` is what that node's processes had
    read by its latest heartbeat. The node counts as lost after `silence_s` seconds without a message.
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
