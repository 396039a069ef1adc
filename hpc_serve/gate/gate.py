"""Decides which requests reach the engine: requests with the service's API key, until the engine drains.

It is an ASGI middleware for `vllm serve --middleware hpc_serve.gate.engine_gate.Gate`. vLLM's own `--api-key` leaves
several routes open, inference among them; this asks for the key on every route but /health. It needs the standard
library and this package on PYTHONPATH, and nothing else, so that it runs in any container.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from hpc_serve.gate.connection_limits import HAS_KEY, WRITE_SIGN, Asked, Message, Send, Signs
from hpc_serve.gate.engine_facts import EngineState, read_adapters_once
from hpc_serve.rendezvous.gate_headers import (
    CANARY_HEADER,
    DRAINING_HEADER,
    ENGINE_HEADER,
    LAUNCHER_HEADER,
    LAUNCHER_VARIABLE,
    REQUESTS_HEADER,
    SIGNS,
    RequestCount,
)
from hpc_serve.rendezvous.record import LOAD_ADAPTER, ONE_REPLICA_ALONE, UNLOAD_ADAPTER

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

_RETRY_AFTER: Header = (b"retry-after", b"2")
_DRAIN_CHECK_INTERVAL_S = 0.25
_MAX_DISCARD_BYTES = 64 << 20
_DISCARD_TIMEOUT_S = 10.0

_NO_KEY = (
    "This engine asks for the API key of its service: send `Authorization: Bearer KEY`. "
    "`hpc-serve env SERVICE` prints the key to the owner of the service; hpc_serve.client.connect() reads it by itself."
)
_PAUSES = {"/pause": True, "/sleep": True, "/resume": False, "/wake_up": False}
"""Whether an engine makes no step after an answer of vLLM to a request with this path, until a later one."""
_DRAINING = (
    "This engine is draining: it finishes the requests it has and accepts no new ones. Ask another replica, or try "
    "again later: `hpc-serve status` lists the replicas."
)


class Gate:
    """Asks for the key in HPC_SERVE_API_KEY_FILE, and answers 503 to new requests once HPC_SERVE_DRAIN_FILE exists.

    The key is read once, at start; without a key every request is refused. GET and HEAD of `/health` need no key. The
    answer has the engine's health, and a header if the engine drains. To a request with the key it says in a header
    whether the engine works. A request that asks for signs gets them once it has shown the key.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = _read_key(os.environ.get("HPC_SERVE_API_KEY_FILE"))
        self._launcher = os.environ.get(LAUNCHER_VARIABLE, "").encode()
        self._drain_file = _DrainFile(os.environ.get("HPC_SERVE_DRAIN_FILE"))
        self._id = secrets.token_hex(4)
        self._count = self._under_way = 0
        self._engine = EngineState()
        self._vllm: Any = None
        self._signs = Signs(lambda: bool(self._engine.fault(self._vllm)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"hpc-serve's gate does not know {scope['type']} connections and refuses them.")
        elif _is_get(scope, "/health"):
            await self._app(scope, receive, _with_headers(send, self._health_headers(scope)))
        elif not self._has_key(scope):
            await _refuse(scope, receive, send, 401, "invalid_api_key", _NO_KEY, ((b"www-authenticate", b"Bearer"),))
        elif (write_sign := scope.pop(WRITE_SIGN, None)) is None:
            await self._let_in(scope, receive, send)
        else:
            self._vllm = scope.get("app")
            scope["headers"] = [header for header in scope["headers"] if header[0] != SIGNS[0]]
            asked = Asked(write_sign, send, asyncio.get_running_loop())
            self._signs.add(asked)
            try:
                await self._let_in(scope, receive, asked.send)
            finally:
                self._signs.remove(asked)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has shown the key."""
        if _is_get(scope, "/metrics"):  # which tell when it has drained
            await self._app(scope, receive, _with_headers(send, [self._requests_header()]))
        elif self._drain_file.exists():
            await _refuse(scope, receive, send, 503, "draining", _DRAINING, (DRAINING_HEADER, _RETRY_AFTER))
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith((LOAD_ADAPTER, UNLOAD_ADAPTER)) or scope["path"].startswith("/adapters"):
            await self._change_adapters(scope, receive, send)
            return
        if _header(scope, CANARY_HEADER[0]) == CANARY_HEADER[1]:
            await self._app(scope, receive, send)
            return
        self._count += 1
        self._under_way += 1
        try:
            await self._app(scope, receive, self._noting_pause(scope["path"], send))
        finally:
            self._under_way -= 1

    def _noting_pause(self, path: str, send: Send) -> Send:
        """Have the engine count as paused, or not any more, once vLLM has answered a request that asks for it."""
        if path not in _PAUSES:
            return send

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._engine.is_paused = _PAUSES[path]
            await send(message)

        return send_and_note

    async def _change_adapters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the launcher alone change adapters. All who may ask have the key: a group, for example."""
        if not self._launcher or not hmac.compare_digest(_header(scope, LAUNCHER_HEADER), self._launcher):
            await _refuse(scope, receive, send, 403, "one_replica_alone", ONE_REPLICA_ALONE, ())
            return
        await self._app(scope, receive, send)
        read_adapters_once(scope.get("app"))

    def _requests_header(self) -> Header:
        count = RequestCount(gate=self._id, count=self._count, under_way=self._under_way)
        return REQUESTS_HEADER, count.text.encode()

    def _has_key(self, scope: Scope) -> bool:
        if self._key is None:
            return False
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        has_key = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)
        if has_key and (tell_connection := scope.get(HAS_KEY)):
            tell_connection()
        return has_key

    def _health_headers(self, scope: Scope) -> list[Header]:
        headers = [DRAINING_HEADER] if self._drain_file.exists() else []
        if self._has_key(scope):
            headers.append((ENGINE_HEADER, self._engine.words(scope.get("app")).encode()))
        return headers


class _DrainFile:
    """Whether the file exists, looked up every `_DRAIN_CHECK_INTERVAL_S` at most. Once seen, it counts as there."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._seen = False
        self._next_check_s = 0.0

    def exists(self) -> bool:
        if self._path and not self._seen and (now_s := time.monotonic()) >= self._next_check_s:
            self._next_check_s = now_s + _DRAIN_CHECK_INTERVAL_S
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
        _log.error(
            "hpc-serve: no API key, so the engine refuses every request: HPC_SERVE_API_KEY_FILE=%s: %s.", path, reason
        )
    return key or None


def _is_get(scope: Scope, path: str) -> bool:
    # A root path of the same name would lead the router to another route.
    return (
        scope["type"] == "http"
        and scope["path"] == path
        and scope["method"] in ("GET", "HEAD")
        and scope.get("root_path", "") != path
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
    """Answer with an error of OpenAI's form. A websocket is refused in its handshake."""
    kind = "http.response"
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": 1008 if status == 401 else 1013, "reason": code})
            return
    else:
        await discard_body(receive)
    error = {"message": text, "type": "invalid_request_error" if status == 401 else code, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    content_headers = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": f"{kind}.start", "status": status, "headers": [*content_headers, *headers]})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else body})


async def discard_body(receive: Receive) -> None:
    """Read the rest of the request: a connection closed before that is reset, and the client loses the answer."""

    async def read() -> None:
        remaining = _MAX_DISCARD_BYTES
        while remaining > 0 and (message := await receive()).get("more_body"):
            remaining -= len(message.get("body", b""))

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), _DISCARD_TIMEOUT_S)
