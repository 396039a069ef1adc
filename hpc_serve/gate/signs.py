"""Signs within answers that the engine works, for clients that ask for them. Standard library only.

A sign is `102 Processing` until the answer begins, and a comment within a stream of events. A request that was silent
for SIGN_S gets one, as long as the engine works. One timer serves all requests; there is none while none asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

WRITE_SIGN = "hpc_serve.write_sign"
"""In the scope of a request that asks: the protocol's function that writes a sign. The gate takes it out."""
SIGN_S = 0.5
_TICK_S = 0.1


class Asked:
    """A request that asks for signs. `write` is told whether a comment may stand in the answer here."""

    __slots__ = ("_loop", "_send", "is_at_comment", "is_events", "sent_at_s", "write")

    def __init__(self, write: Callable[[bool], None], send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self.write, self._send, self._loop = write, send, loop
        self.sent_at_s = loop.time()
        self.is_events = self.is_at_comment = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a part of the answer, and note where in the answer it ends."""
        self.sent_at_s = self._loop.time()
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            kind = headers.get(b"content-type", b"")
            self.is_events = kind.startswith(b"text/event-stream") and b"content-encoding" not in headers
            self.is_at_comment = self.is_events
        elif self.is_events and (body := message.get("body")):
            self.is_at_comment = body.endswith((b"\n\n", b"\r\n\r\n"))
        return self._send(message)


class Signs:
    """Sends signs to all requests that ask, while `has_fault` is false."""

    def __init__(self, has_fault: Callable[[], bool]) -> None:
        self._has_fault = has_fault
        self._asked: dict[Asked, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the timer runs."""
        return self._timer is not None

    def add(self, asked: Asked) -> None:
        self._asked[asked] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def remove(self, asked: Asked) -> None:
        del self._asked[asked]

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_S, self._tick) if self._asked else None
        now_s = loop.time()
        silent = [asked for asked in self._asked if now_s - asked.sent_at_s >= SIGN_S - _TICK_S]
        if silent and not self._has_fault():
            for asked in silent:
                asked.sent_at_s = now_s
                asked.write(asked.is_at_comment)
