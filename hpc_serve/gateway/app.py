"""The ASGI application of a gateway: who may ask, what the gateway answers itself, and what is passed on.

On a Unix socket in a private folder everybody who can connect may ask; on a port, who shows the key. Requests of web
pages are refused but for the origins that were allowed: a socket that is forwarded to a laptop is open to its browser.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from hpc_serve.gate.connection_limits import HAS_KEY
from hpc_serve.gate.gate import discard_body
from hpc_serve.gateway.answers import Refusal, refusal_of
from hpc_serve.gateway.bodies import asked_model
from hpc_serve.gateway.directory import Directory
from hpc_serve.gateway.forwarding import (
    Asked,
    Bodies,
    BrokenAnswerError,
    ClientLeftError,
    Receive,
    Scope,
    Send,
    forward,
)
from hpc_serve.gateway.headers import BadHeaderError, for_engine, hosts_of, is_own_host, value_of
from hpc_serve.gateway.metrics import CONTENT_TYPE, Metrics
from hpc_serve.gateway.routes import route_of
from hpc_serve.gateway.settings import Settings
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore

CLIENT_LEFT = 499
_MODELS = "/v1/models"

_log = logging.getLogger(__name__)


class Gateway:
    """One gateway; see `make_app`."""

    def __init__(self, store: ServiceStore, settings: Settings) -> None:
        self._settings = settings
        self._key = settings.key.encode() if settings.key is not None else None
        self._directory = Directory(store, settings)
        self._metrics = Metrics(self._directory)
        self._bodies = Bodies(most_bytes=settings.most_body_bytes, most_held_bytes=settings.most_held_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            raise RuntimeError(f"the gateway does not know {scope['type']} connections and refuses them")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        following = asyncio.create_task(self._directory.follow())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        following.cancel()
        await self._directory.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own: Response | None
        try:
            self._check_host(scope)
            if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
                own = JSONResponse({"status": "ok"})
            else:
                self._admit(scope)
                own = await self._own_answer(scope)
        except Refusal as refusal:
            await discard_body(receive)
            await _refuse(scope, receive, send, refusal)
            return
        if own is not None:
            await own(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    # -- who may ask

    def _check_host(self, scope: Scope) -> None:
        """Raise Refusal for a foreign host: a web page may have had its name resolved to this one (DNS rebinding)."""
        named = self._settings.hosts
        foreign = next((host for host in hosts_of(scope["headers"]) if not is_own_host(host, named or ())), None)
        if named is not None and foreign is not None:
            text = (
                f"The gateway does not answer as {foreign[:80]!r}: ask it as localhost, or start it with --allow-host."
            )
            raise Refusal(status=421, code="host_not_allowed", message=text)

    def _admit(self, scope: Scope) -> None:
        """Raise Refusal for whoever may not ask."""
        origin = value_of(scope["headers"], b"origin").decode("latin-1")
        if origin and origin not in self._settings.origins:
            text = "Web pages of this origin may not ask the gateway: start it with --allow-origin to let them."
            raise Refusal(status=403, code="origin_not_allowed", message=text)
        if self._key is not None and not self._has_key(scope):
            text = "This gateway asks for its key: send `Authorization: Bearer KEY`. Its owner has the file of the key."
            headers = {"www-authenticate": "Bearer"}
            raise Refusal(status=401, code="invalid_api_key", message=text, headers=headers)
        if tell_connection := scope.get(HAS_KEY):
            tell_connection()

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = value_of(scope["headers"], b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            given = value_of(scope["headers"], b"x-api-key")  # of Anthropic's SDKs
        assert self._key is not None
        return hmac.compare_digest(given.strip(), self._key)

    # -- what the gateway answers itself

    async def _own_answer(self, scope: Scope) -> Response | None:
        path, method = scope["path"], scope["method"]
        if method not in ("GET", "HEAD"):
            return None
        if path == "/metrics":
            return PlainTextResponse(self._metrics.text(), media_type=CONTENT_TYPE)
        if path == _MODELS:
            return JSONResponse({"object": "list", "data": await self._directory.models()})
        if path.startswith(f"{_MODELS}/"):
            wanted = path.removeprefix(f"{_MODELS}/")
            for model in await self._directory.models():
                if model["id"] == wanted:
                    return JSONResponse(model)
            raise Refusal(status=404, code="model_not_found", message=f"There is no model {wanted[:80]!r}.")
        return None

    # -- what is passed on

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[int] = []
        service, route, status = "", "other", CLIENT_LEFT
        try:
            asked = await self._read(scope, receive, held)
            route = asked.route
            front = await self._directory.find(asked.model)
            service = front.service
            status = await _while_there(forward(front, asked, send, self._metrics), receive)
        except ClientLeftError:
            pass
        except BrokenAnswerError:
            status = 200  # uvicorn closes the connection of an answer that does not end
        except asyncio.CancelledError:
            raise
        except Exception as error:
            refusal = refusal_of(error, service)
            status = refusal.status
            if status >= 500:
                _log.warning("%s", printable(f"{service or 'no service'}, {route}: HTTP {status}: {refusal.message}"))
            await _refuse(scope, receive, send, refusal)
        finally:
            self._bodies.release(held)
            self._metrics.requests.labels(service, route, str(status)).inc()

    async def _read(self, scope: Scope, receive: Receive, held: list[int]) -> Asked:
        """Return the request that is to be passed on. Raises Refusal, ClientLeftError."""
        route = route_of(scope["method"], scope["raw_path"])
        if route is None:
            text = f"{scope['method']} {scope['path'][:200]} is no route that this gateway passes on."
            raise Refusal(status=404, code="not_found", message=text)
        try:
            headers = for_engine(scope["headers"])
        except BadHeaderError as error:
            raise Refusal(status=400, code="bad_header", message=f"{error}.") from None
        query = scope["query_string"]
        if not all(0x21 <= byte <= 0x7E for byte in query):
            raise Refusal(
                status=400, code="bad_query", message="The query of the URL has characters that none may have."
            )
        content_type = value_of(headers, b"content-type").decode("latin-1")
        body = await self._bodies.read(receive, value_of(scope["headers"], b"content-length"), held)
        return Asked(
            method=scope["method"],
            route=route,
            query=b"?" + query if query else b"",
            headers=headers,
            content_type=content_type,
            body=body,
            model=asked_model(content_type, body),
        )


def make_app(store: ServiceStore, settings: Settings) -> Any:
    """Return the application of a gateway to the services of `store`."""
    gateway = Gateway(store, settings)
    if not settings.origins:
        return gateway
    return CORSMiddleware(
        gateway, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=600
    )


async def _while_there(work: Any, receive: Receive) -> int:
    """Return what `work` returns. Cancel it when the client leaves, and raise ClientLeftError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            status: int = working.result()
            return status
        raise ClientLeftError
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    await JSONResponse(refusal.content, status_code=refusal.status, headers=dict(refusal.headers))(scope, receive, send)
