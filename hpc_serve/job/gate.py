"""The engine's door: who may come in, and whether it still takes anybody. What is asked for is the engine's matter.

An ASGI middleware for `vllm serve --middleware hpc_serve.job.gate.Gate`. vLLM's own `--api-key` leaves several
routes open, full inference among them; this asks for the key on every route but /health. It is one file without
imports of ours or anybody's, so that a container needs just its folder on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

DRAINING_HEADER: Header = (b"x-hpc-serve", b"draining")
CHALLENGE_HEADER = b"x-hpc-serve-challenge"
PROOF_HEADER = b"x-hpc-serve-proof"
_LONGEST_CHALLENGE = 128
_RETRY_AFTER: Header = (b"retry-after", b"2")
_DRAIN_CHECK_S = 0.25
_DISCARD_BYTES = 64 << 20
_DISCARD_S = 10.0

_NO_KEY = (
    "This engine asks for the API key of its service: send `Authorization: Bearer KEY`. "
    "`hpc-serve env SERVICE` prints the key to the owner of the service; hpc_serve.client.connect() finds it by itself."
)
_DRAINING = (
    "This engine is draining: it finishes what it has and takes no new requests. Ask another replica, or try again "
    "later: `hpc-serve status` shows what there is."
)


class Gate:
    """Asks for the key of HPC_SERVE_API_KEY_FILE, and turns new requests away once HPC_SERVE_DRAIN_FILE exists.

    The key is read once, at start; without one nobody is let in. `/health` (GET and HEAD) is open: it tells the
    engine's health and, in headers, that it drains and that it knows the key (see `prove`).
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = _read_key(os.environ.get("HPC_SERVE_API_KEY_FILE"))
        self._drain = _DrainFile(os.environ.get("HPC_SERVE_DRAIN_FILE"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"hpc-serve's gate knows no {scope['type']} connections and lets none through.")
        elif _is_health(scope):
            await self._app(scope, receive, _with_headers(send, self._health_headers(scope)))
        elif not self._may_enter(scope):
            await _refuse(scope, receive, send, 401, "invalid_api_key", _NO_KEY, ((b"www-authenticate", b"Bearer"),))
        elif self._drain.exists():
            await _refuse(scope, receive, send, 503, "draining", _DRAINING, (DRAINING_HEADER, _RETRY_AFTER))
        else:
            await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        return self._key is not None and scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)

    def _health_headers(self, scope: Scope) -> list[Header]:
        headers = [DRAINING_HEADER] if self._drain.exists() else []
        challenge = _header(scope, CHALLENGE_HEADER)
        if self._key is not None and 0 < len(challenge) <= _LONGEST_CHALLENGE:
            headers.append((PROOF_HEADER, prove(self._key, challenge)))
        return headers


def prove(key: bytes, challenge: bytes) -> bytes:
    """What only a holder of the key can answer to `challenge`, without showing the key.

    A client asks for it before it sends the key: the port of an engine that died may be somebody else's by now.
    """
    return hmac.new(key, b"hpc-serve-probe:" + challenge, "sha256").hexdigest().encode()


class _DrainFile:
    """Whether the file exists, looked up a few times a second at most; once seen, it stays seen."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._seen = False
        self._next_look_s = 0.0

    def exists(self) -> bool:
        if self._path and not self._seen and (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + _DRAIN_CHECK_S
            self._seen = os.path.exists(self._path)
        return self._seen


def _read_key(path: str | None) -> bytes | None:
    try:
        with open(path or "", "rb") as file:
            key = file.read().strip()
        reason = "it is empty"
    except OSError as error:
        key, reason = b"", error.strerror or type(error).__name__
    if not key:
        print(
            f"hpc-serve: the engine's gate has no API key and lets nobody in: HPC_SERVE_API_KEY_FILE={path}: {reason}.",
            file=sys.stderr,
            flush=True,
        )
    return key or None


def _is_health(scope: Scope) -> bool:
    # A root path of /health would make the router see this very path as another one.
    return (
        scope["type"] == "http"
        and scope["path"] == "/health"
        and scope["method"] in ("GET", "HEAD")
        and scope.get("root_path", "") != "/health"
    )


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for given, value in scope["headers"] if given.lower() == name), b"")


def _with_headers(send: Send, headers: list[Header]) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return send_with_headers if headers else send


async def _refuse(
    scope: Scope, receive: Receive, send: Send, status: int, code: str, text: str, headers: Iterable[Header]
) -> None:
    """Answer in the shape of OpenAI's errors; a websocket is refused in its handshake."""
    kind = "http.response"
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008 if status == 401 else 1013, "reason": code})
            return
    else:
        await _discard_body(receive)
    error = {"message": text, "type": "invalid_request_error" if status == 401 else code, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    plain = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": f"{kind}.start", "status": status, "headers": [*plain, *headers]})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else body})


async def _discard_body(receive: Receive) -> None:
    """Read what the client is still sending: closing on it would reset the connection and lose the answer."""

    async def read() -> None:
        left = _DISCARD_BYTES
        while left > 0 and (message := await receive()).get("more_body"):
            left -= len(message.get("body", b""))

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), _DISCARD_S)
