"""The headers between the gate in an engine and its clients. Pure, with the standard library alone.

The gate decides its answers; the client decides which answers it believes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

DRAINING_HEADER = (b"x-hpc-serve", b"draining")
"""In answers of an engine that accepts no new requests."""
CANARY_HEADER = (b"x-hpc-serve", b"canary")
"""In requests of the engine's own launcher, which only wants to know whether it answers."""
LAUNCHER_HEADER, LAUNCHER_VARIABLE = b"x-hpc-serve-launcher", "HPC_SERVE_LAUNCHER_TOKEN"
"""In requests of the engine's own launcher: what it alone knows. The engine has it in its environment."""
SIGNS = (b"x-hpc-serve-signs", b"1")
"""In requests that ask for signs that the engine lives, until and within the answer: `gate/connection_limits.py`."""
ENGINE_HEADER = b"x-hpc-serve-engine"
"""In answers of /health to who shows the key: `idle`, `busy`, `paused`, or why the engine counts as hung."""
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""The sign until an answer begins."""
COMMENT = b":\n\n"
"""The sign within a stream of events, which is a comment there."""
COMMENT_CHUNK = b"3\r\n" + COMMENT + b"\r\n"
"""The same as a chunk of the answer's body."""
REQUESTS_HEADER = b"x-hpc-serve-requests"
"""In answers of /metrics: the RequestCount of the gate that passed the question on."""


ENGINE_WORDS = ("idle", "busy", "paused")
"""What ENGINE_HEADER says of an engine that works. `paused`: it was told to make no step."""


@dataclass(frozen=True, kw_only=True)
class RequestCount:
    """How many requests one gate has let through, without GET, HEAD and canaries, and how many are `under_way`.

    An engine with several server processes has as many gates; `gate` tells them apart.
    """

    gate: str
    count: int
    under_way: int

    @property
    def text(self) -> str:
        return f"{self.gate} {self.count} {self.under_way}"


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How many requests run and wait, by the engine's figures, and what its gate has counted."""

    running: int
    waiting: int
    requests: RequestCount


_REQUESTS = re.compile(r"(\w{1,32}) (\d{1,15}) (\d{1,15})")


class Headers(Protocol):
    """The headers of an answer, whichever HTTP library has read it."""

    def get(self, key: str, /) -> str | None: ...


def is_draining(headers: Headers) -> bool:
    """Return whether an answer says that its engine accepts no new requests."""
    return headers.get(DRAINING_HEADER[0].decode()) == DRAINING_HEADER[1].decode()


def why_hung(headers: Headers) -> str:
    """Return why an answer of /health says that its engine hangs; "" if it does not say so.

    >>> why_hung({"x-hpc-serve-engine": "busy"}), why_hung({"x-hpc-serve-engine": "no step for 9 s"}), why_hung({})
    ('', 'no step for 9 s', '')
    """
    words = headers.get(ENGINE_HEADER.decode()) or ""
    return "" if words in ENGINE_WORDS else words


def read_request_count(headers: Headers) -> RequestCount | None:
    """Read the count of requests from the headers of a /metrics answer; None if it has no such header.

    >>> read_request_count({"x-hpc-serve-requests": "5f3a 17 2"})
    RequestCount(gate='5f3a', count=17, under_way=2)
    """
    found = _REQUESTS.fullmatch(headers.get(REQUESTS_HEADER.decode()) or "")
    if found is None:
        return None
    return RequestCount(gate=found[1], count=int(found[2]), under_way=int(found[3]))
