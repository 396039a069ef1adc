"""The connections below an OpenAI client: of one process, and of one event loop where there are several.

Event loops of asyncio have a pool of ours (`engine_pool`). Threads, trio, and asyncio without httptools have the HTTP
library's, which keeps connections by the host of their URL. There that host stands for one engine, at one address, with
one way to verify it (`origins`), so that no request meets a connection that was verified for another.
"""

from __future__ import annotations

import functools
import importlib.util
import ssl
from typing import Any

from hpc_serve.client.connections.answer_wait import Judge
from hpc_serve.client.connections.message import Answer, Message
from hpc_serve.client.connections.origins import Origins
from hpc_serve.client.connections.verified_streams import AsyncVerifyingBackend, VerifyingBackend
from hpc_serve.client.replicas.event_loops import InLoop, InThread, has_ended, is_asyncio, running_loop
from hpc_serve.client.replicas.fork import leave_behind, renew_after_fork
from hpc_serve.client.replicas.sdk import core, http

# As many connections as the SDK allows. vLLM closes idle ones after 5 s: close them here before, or a request fails.
POOL: dict[str, Any] = {"max_connections": 1000, "max_keepalive_connections": 100, "keepalive_expiry": 4.0}


class ThreadConnections(InThread):
    """The connections of this process, for the requests of its threads. URLs are `http://ORIGIN`."""

    def __init__(self, judge: Judge) -> None:
        self.origins = Origins(judge)
        self._inner = _transport(self.origins)
        renew_after_fork(self)

    async def send(self, message: Message) -> http.Response:
        """Return the response to a request; its body was not read."""
        return self._inner.handle_request(message.as_http(self.origins.origin_of(message.replica)))

    async def read(self, response: Any) -> bytes:
        data: bytes = response.read()
        return data

    def iterate(self, body: Any) -> Any:
        return iter(body)

    async def next_of(self, pieces: Any) -> bytes | None:
        """Return the next of the pieces of a body; None at its end."""
        return next(pieces, None)

    async def close(self, response: Any) -> None:
        """Close a response, or the stream of one."""
        response.close()

    async def close_all(self) -> None:
        self._inner.close()

    def after_fork(self) -> None:
        _unlock(self._inner)
        leave_behind(self._inner)
        self.origins.leave_all()
        self._inner = _transport(self.origins)


class LoopConnections(InLoop):
    """The connections of each event loop that runs, as a connection is of use in its own loop alone."""

    def __init__(self, judge: Judge) -> None:
        self.origins = Origins(judge)
        self._inner: dict[Any, Any] = {}
        renew_after_fork(self)

    async def send(self, message: Message) -> http.Response | Answer:
        """Return the response to a request; its body was not read."""
        loop = running_loop()
        if (inner := self._inner.get(loop)) is None:
            self._forget_ended_loops()
            inner = self._inner[loop] = _loop_connections(loop, self.origins)
        if isinstance(inner, http.AsyncHTTPTransport):
            return await inner.handle_async_request(message.as_http(self.origins.origin_of(message.replica)))
        answer: Answer = await inner.send(message)
        return answer

    async def read(self, response: http.Response | Answer) -> bytes:
        return await response.aread()

    def iterate(self, body: Any) -> Any:
        return aiter(body)

    async def next_of(self, pieces: Any) -> bytes | None:
        """Return the next of the pieces of a body; None at its end."""
        return await anext(pieces, None)

    async def close(self, response: Any) -> None:
        """Close a response, or the stream of one."""
        await response.aclose()

    async def close_all(self) -> None:
        """Close the connections of the event loop that runs."""
        self._forget_ended_loops()
        if (inner := self._inner.pop(running_loop(), None)) is not None:
            await inner.aclose()

    def _forget_ended_loops(self) -> None:
        ended = [loop for loop in list(self._inner) if has_ended(loop)]
        for loop in ended:
            self._inner.pop(loop, None)
        if ended:
            for connection in self.origins.connections():
                connection.end_with_loop()

    def after_fork(self) -> None:
        leave_behind(self._inner)
        self.origins.leave_all()
        self._inner = {}


Connections = ThreadConnections | LoopConnections


def _transport(origins: Origins) -> http.HTTPTransport:
    transport = http.HTTPTransport(verify=_unused_context(), trust_env=False)
    # The library has no public way to hand its pool a network backend; tests hold this one.
    transport._pool = core.ConnectionPool(network_backend=VerifyingBackend(origins), **POOL)
    return transport


def _loop_connections(loop: Any, origins: Origins) -> Any:
    if is_asyncio(loop) and importlib.util.find_spec("httptools"):
        from hpc_serve.client.connections.engine_pool import EnginePool

        return EnginePool(origins, POOL)
    transport = http.AsyncHTTPTransport(verify=_unused_context(), trust_env=False)
    transport._pool = core.AsyncConnectionPool(network_backend=AsyncVerifyingBackend(origins), **POOL)
    return transport


def _unlock(transport: http.HTTPTransport) -> None:
    """In a forked process: whoever closes an answer that it inherited must not wait for a thread that is not there."""
    pool: Any = transport._pool
    pool._optional_thread_lock = type(pool._optional_thread_lock)()


@functools.cache
def _unused_context() -> ssl.SSLContext:
    """It trusts nobody. The library's own would read all of the system's authorities first."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
