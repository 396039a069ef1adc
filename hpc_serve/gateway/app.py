"""The application of a gateway: who may ask, what the gateway answers itself, and what is passed on.

On a Unix socket in a private folder everybody who can connect may ask; on a port, who shows the owner's key or a
personal one. Requests of web pages are refused but for the origins that were allowed: a socket that is forwarded to a
laptop is open to its browser.

One page is the gateway's own, on which a person talks to its services. Its script (chat_page.js) asks the gateway as
any client does, and no other host. The page holds nothing secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from markupsafe import Markup

from hpc_serve.client.connections.message import Header, Message
from hpc_serve.gateway.answers import JSON, Refusal, refusal_of
from hpc_serve.gateway.backend import BrokenAnswerError, forward
from hpc_serve.gateway.directory import Directory
from hpc_serve.gateway.http_parts import for_engine, is_own_host, read_body, route_of
from hpc_serve.gateway.metrics import CONTENT_TYPE, Metrics
from hpc_serve.gateway.request import People, Request
from hpc_serve.gateway.settings import MIB, Settings
from hpc_serve.pages.frame import document
from hpc_serve.printable import printable
from hpc_serve.rendezvous.gate_headers import SIGNS
from hpc_serve.rendezvous.record import LOAD_ADAPTER, ONE_REPLICA_ALONE, UNLOAD_ADAPTER
from hpc_serve.rendezvous.store import ServiceStore

_CLIENT_LEFT = 499
_SAVE_S = 1.0
_MODELS = b"/v1/models"
_VARY = (b"vary", b"Origin")
_PAGE_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
"""Of the page for people, which no other page may show inside of it."""
_HERE = Path(__file__).parent
_PAGE_BODY = Markup(
    '<header><b>hpc-serve</b><label>Model <select id="model"></select></label>'
    '<button id="new" type="button">New talk</button></header>'
    '<form id="key" hidden><label for="given">This gateway asks for its key.</label>'
    '<input id="given" type="password" autocomplete="off"><button>Use it</button></form>'
    '<main id="talk" aria-live="polite"></main>'
    '<form id="ask"><textarea id="question" rows="2" aria-label="Question" placeholder="Ask something" autofocus>'
    '</textarea><button id="send" disabled>Send</button></form>'
)


_log = logging.getLogger(__name__)


class Gateway:
    """One gateway to the services of `store`."""

    def __init__(self, store: ServiceStore, settings: Settings) -> None:
        self._settings = settings
        self._key = settings.key.encode() if settings.key is not None else None
        has_people = settings.key is not None and store.owner is None
        self._people = People(store.home / "gateway") if has_people else None
        self._metrics = Metrics(settings.counts_file)
        self._directory = Directory(store, settings, self._metrics.of)
        self._metrics.under_way = self._directory.counts
        self._held_bytes = 0
        self._following: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Look for services and keys from now on, in the event loop that runs."""
        loop = asyncio.get_running_loop()
        self._following = [loop.create_task(self._directory.follow())]
        if self._people is not None:
            self._following.append(loop.create_task(self._people.follow()))
        if self._settings.counts_file is not None:
            self._following.append(loop.create_task(self._save_counts()))

    async def _save_counts(self) -> None:
        while True:
            self._metrics.save()
            await asyncio.sleep(_SAVE_S)

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await self._directory.close()
        if self._people is not None:
            await asyncio.to_thread(self._people.save)

    # -- who may ask

    @property
    def asks_for_key(self) -> bool:
        return self._key is not None

    def let_in(self, request: Request) -> None:
        """Raise Refusal for a request that is refused by its head."""
        if self._is_preflight(request):
            return
        self._check_host(request)
        is_open = request.path in (b"/health", b"/") and request.method in ("GET", "HEAD")
        if not is_open:  # what is open holds nothing secret: everybody who can connect may ask it
            self._admit(request)
            request.connection.show_key()
        if request.length > self._settings.most_body_bytes:
            raise self._too_large()

    def _check_host(self, request: Request) -> None:
        """Raise Refusal for a foreign host: a web page may have had its name resolved to this one (DNS rebinding)."""
        named = self._settings.hosts
        if named is None:
            return
        for name, value in request.headers:
            if name == b"host" and not is_own_host(value, named):
                foreign = repr(value[:80].decode("latin-1"))
                text = f"The gateway does not answer as {foreign}: ask it as localhost, or start it with --allow-host."
                raise Refusal(status=421, code="host_not_allowed", message=text)

    def _admit(self, request: Request) -> None:
        """Raise Refusal for whoever may not ask."""
        origin = request.value_of(b"origin").decode("latin-1")
        if origin and origin not in self._settings.origins and origin != self._own_origin(request):
            text = "Web pages of this origin may not ask the gateway: start it with --allow-origin to let them."
            raise Refusal(status=403, code="origin_not_allowed", message=text)
        if self._key is not None and not self._has_key(request):
            text = "This gateway asks for its key: send `Authorization: Bearer KEY`. Its owner has the file of the key."
            if request.value_of(b"authorization") or request.value_of(b"x-api-key"):
                text = "The gateway does not know the key that was sent, or it was revoked. Its owner has the keys."
            bearer = (b"www-authenticate", b"Bearer")
            raise Refusal(status=401, code="invalid_api_key", message=text, headers=[bearer])

    def _own_origin(self, request: Request) -> str:
        """Return the origin of a page that came from the address that is asked now: the gateway's own."""
        scheme = "http" if self._settings.hosts is not None else "https"
        return f"{scheme}://{request.value_of(b'host').decode('latin-1')}"

    def _has_key(self, request: Request) -> bool:
        scheme, _, given = request.value_of(b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            given = request.value_of(b"x-api-key")  # of Anthropic's SDKs
        assert self._key is not None
        if hmac.compare_digest(given.strip(), self._key):
            return True
        request.person = self._people.with_key(given.strip()) if self._people is not None else None
        return request.person is not None

    # -- bodies that are held

    def hold(self, request: Request, size: int) -> None:
        """Count bytes of a body. Raises Refusal."""
        if request.held_bytes + size > self._settings.most_body_bytes:
            raise self._too_large()
        if self._held_bytes + size > self._settings.most_held_bytes:
            text = f"The gateway holds {self._held_bytes / MIB:.0f} MiB of requests, and takes no more until some end."
            raise Refusal(status=429, code="memory_full", message=text)
        self._held_bytes += size
        request.held_bytes += size

    def release(self, request: Request) -> None:
        """Count the bytes of a body no more."""
        self._held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _too_large(self) -> Refusal:
        most = self._settings.most_body_bytes / MIB
        text = f"The body is larger than {most:g} MiB. Send less, or start the gateway with another --max-body."
        return Refusal(status=413, code="body_too_large", message=text)

    # -- what the gateway answers itself

    def answer(self, request: Request) -> Awaitable[None]:
        """Answer a request that was let in."""
        may_be_own = request.method in ("GET", "HEAD") or self._is_preflight(request)
        return self._answer_own(request) if may_be_own else self._pass_on(request)

    async def _answer_own(self, request: Request) -> None:
        """Answer a request for a page or list of the gateway's own, and pass any other on."""
        if request.method == "OPTIONS":
            self._answer_preflight(request)
        elif request.path == b"/health":
            self._respond(request, {"status": "ok"})
        elif request.path == b"/":
            request.respond(200, _chat_page(), _PAGE_HEADERS)
        elif request.path == b"/metrics":
            headers = [(b"content-type", CONTENT_TYPE.encode()), *self._for_page(request)]
            request.respond(200, self._metrics.text(), headers)
        elif request.path == _MODELS:
            self._respond(request, {"object": "list", "data": await self._directory.models()})
        elif request.path.startswith(_MODELS + b"/"):
            await self._answer_model(request)
        else:
            await self._pass_on(request)

    async def _answer_model(self, request: Request) -> None:
        wanted = unquote_to_bytes(request.path.removeprefix(_MODELS + b"/")).decode(errors="replace")
        for model in await self._directory.models():
            if model["id"] == wanted:
                self._respond(request, model)
                return
        refusal = Refusal(status=404, code="model_not_found", message=f"There is no model {wanted[:80]!r}.")
        request.refuse(refusal, *self._for_page(request))

    def _respond(self, request: Request, content: dict[str, Any]) -> None:
        request.respond(200, json.dumps(content).encode(), [JSON, *self._for_page(request)])

    # -- web pages that were let in

    def _for_page(self, request: Request) -> Sequence[Header]:
        """Return the headers that let a web page read an answer."""
        origin = request.value_of(b"origin") if self._settings.origins else b""
        return ((b"access-control-allow-origin", origin), _VARY) if origin else ()

    def _is_preflight(self, request: Request) -> bool:
        return (
            request.method == "OPTIONS"
            and request.value_of(b"origin").decode("latin-1") in self._settings.origins
            and bool(request.value_of(b"access-control-request-method"))
        )

    def _answer_preflight(self, request: Request) -> None:
        headers = [
            *self._for_page(request),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", request.value_of(b"access-control-request-headers") or b"*"),
            (b"access-control-max-age", b"600"),
        ]
        request.respond(200, b"OK", headers)

    # -- what is passed on

    async def _pass_on(self, request: Request) -> None:
        service, status = "", _CLIENT_LEFT
        try:
            message = self._read(request)
            if self._people is not None:
                self._people.begin(request)
            backend = self._directory.known(request.model)
            if backend is None:
                backend = await self._directory.find(request.model)
            service = backend.service
            status = await forward(backend, message, request, self._for_page(request))
        except BrokenAnswerError:
            status = 200
            request.break_off()
        except asyncio.CancelledError:
            if not request.has_left:
                raise
        except Exception as error:
            refusal = refusal_of(error, service)
            status = refusal.status
            if status >= 500:
                what = f"{service or 'no service'}, {request.route}"
                _log.warning("%s", printable(f"{what}: HTTP {status}: {refusal.message}"))
            request.refuse(refusal, *self._for_page(request))
        finally:
            self._metrics.count(service, request.route, status)
            if self._people is not None:
                self._people.end(request)

    def _read(self, request: Request) -> Message:
        """Return the request as it is passed on. Raises Refusal."""
        route = route_of(request.method, request.path)
        if route is None:
            path = request.path[:200].decode("latin-1")
            cure = f" {ONE_REPLICA_ALONE}" if path in (LOAD_ADAPTER, UNLOAD_ADAPTER) else ""
            raise Refusal(
                status=404,
                code="not_found",
                message=f"{request.method} {path} is no route that this gateway passes on.{cure}",
            )
        request.route, content_type = route, request.content_type
        request.fields, request.model = read_body(content_type, request.body)
        headers = for_engine(request.headers)
        return Message(
            method=request.method,
            target=route.encode() + (b"?" + request.query if request.query else b""),
            headers=headers,
            content=request.body,
            fields=request.fields,
            wants_signs=SIGNS in headers,
        )


@cache
def _chat_page() -> bytes:
    """Return the page, in UTF-8."""
    style, script = ((_HERE / f"chat_page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return document("hpc-serve", _PAGE_BODY, style=style, script=script, asks_its_host=True).encode()
