"""How an answer is passed on to a client that reads slowly."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the gateway needs it")

from hpc_serve.client.connections.body import Body, Take
from hpc_serve.gateway.forwarding import forward
from hpc_serve.gateway.metrics import Counts
from hpc_serve.gateway.request import Request


class Client:
    """A connection of a client. Each write makes that of a slow one full."""

    ends_now = False

    def __init__(self, *, is_slow: bool) -> None:
        self.written: list[bytes] = []
        self.is_full = False
        self.waits = 0
        self._is_slow = is_slow

    def show_key(self) -> None: ...

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.is_full = self._is_slow

    async def room(self) -> None:
        self.waits += 1
        self.is_full = False


class Engine(Body):
    """Its answer offers each piece to who takes it, before the reader gets it."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)
        self._take: Take = lambda piece: False
        self.taken: list[bool] = []

    def give_to(self, take: Take) -> None:
        self._take = take

    async def read(self) -> bytes | None:
        while self._pieces:
            piece = self._pieces.pop(0)
            self.taken.append(self._take(piece))
            if not self.taken[-1]:
                return piece
        return None

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("is_slow", [True, False])
def test_nothing_is_taken_past_the_request_while_the_client_has_much_to_read(is_slow: bool) -> None:
    body, client = Engine(b"one", b"two", b"three"), Client(is_slow=is_slow)
    answer = SimpleNamespace(status_code=200, raw_headers=[], is_event_stream=True)
    exchange = SimpleNamespace(answer=answer, body=body, replica="1-r0-0.json", sent=1, resumed=0)

    async def send(*asked: Any) -> Any:
        return exchange

    turns = SimpleNamespace(enter_now=lambda: True, leave=lambda: None)
    front: Any = SimpleNamespace(counts=Counts(), turns=turns, is_ready=True, send=send, service="8b")
    request = Request(client, "POST", b"/v1/completions", [])
    message: Any = None
    assert asyncio.run(forward(front, message, request, ())) == 200
    assert body.taken == [not is_slow] * 3
    assert client.waits == (3 if is_slow else 0)
    assert b"".join(client.written).endswith(b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
    assert front.counts.sent_bytes == len(b"onetwothree")
