"""Requests as they are sent: to which address, with whose key, on which connections. `exchange` decides when."""

from __future__ import annotations

import functools
from typing import Any

from hpc_serve.client.connections.origins import Origins
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.resume.relay import Ask
from hpc_serve.rendezvous.gate_headers import SIGNS

CONNECT_S = 5.0
CONNECT_FIRST_S = 1.5  # where another replica can be tried: one lost packet is sent again after 1 s


def addressed(
    request: http.Request,
    replica: ReplicaAddress,
    origins: Origins,
    *,
    content: bytes | None = None,
    connect_s: float = CONNECT_S,
) -> http.Request:
    """A user's request as the inner transport takes it: its URL names connections that are verified for this replica.

    `content` takes the place of its body.
    """
    url = _url_at(request.url.raw_path, "http", origins.origin_of(replica), replica.port)
    headers, extensions = _headers(request, replica), _extensions(request, connect_s)
    if content is None:
        return http.Request(request.method, url, headers=headers, stream=request.stream, extensions=extensions)
    headers["Content-Length"] = str(len(content))
    stream = http.ByteStream(content)
    return http.Request(request.method, url, headers=headers, stream=stream, extensions=extensions)


def own_request(request: http.Request, replica: ReplicaAddress, origins: Origins, ask: Ask) -> http.Request:
    """A request of our own, with the headers and timeouts of the user's."""
    headers, extensions = _headers(request, replica), _extensions(request, CONNECT_S)
    headers["Content-Length"] = str(len(ask.content))
    url = f"http://{origins.origin_of(replica)}:{replica.port}{ask.path}"
    return http.Request(ask.method, url, headers=headers, content=ask.content, extensions=extensions)


def shown_url(url: http.URL, replica: ReplicaAddress) -> http.URL:
    """The request's URL as its user sees it, in errors and answers."""
    return _url_at(url.raw_path, "https", replica.host, replica.port)


@functools.lru_cache(maxsize=256)
def _url_at(path: bytes, scheme: str, host: str, port: int) -> http.URL:
    # Kept, as a new one costs fifty times as much, which is a good part of what a request costs here.
    return http.URL(scheme=scheme, host=host, port=port, raw_path=path)


def _headers(request: http.Request, replica: ReplicaAddress) -> http.Headers:
    headers = request.headers.copy()
    headers["Host"] = request.url.netloc.decode("ascii")
    # Always the service's own key: the SDK may have taken keys and headers meant for OpenAI from the environment.
    headers["Authorization"] = f"Bearer {replica.identity.api_key}"
    headers[SIGNS[0].decode()] = SIGNS[1].decode()
    return headers


def _extensions(request: http.Request, connect_s: float) -> dict[str, Any]:
    timeout = dict(request.extensions.get("timeout") or {})
    timeout["connect"] = min(timeout.get("connect") or connect_s, connect_s)
    return {**request.extensions, "timeout": timeout}
