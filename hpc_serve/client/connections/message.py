"""A request to a service, as every kind of connection sends it to a replica.

The HTTP library's own values cost more than all else that a request costs in an event loop.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.rendezvous.fields import host_and_port
from hpc_serve.rendezvous.gate_headers import SIGNS

Header = tuple[bytes, bytes]
_ILLEGAL = re.compile(rb"[\r\n\0]")
_OURS = frozenset((b"host", b"authorization", b"content-length", SIGNS[0]))


def _is_form(request: http.Request) -> bool:
    """Return whether a body is a form of known length, as with an audio file: it is held, to be sent again."""
    is_form = request.headers.get("content-type", "").startswith("multipart/form-data")
    return is_form and "content-length" in request.headers and isinstance(request.stream, Iterable)


@dataclass(kw_only=True, slots=True)
class Message:
    """A request to a service. `target` is its path with the query.

    The body is `content`, or an `upload` that can be read once; `fields` are those of its JSON, if they are known.
    `of_user` is the same request as its user has it.
    """

    method: str
    target: bytes
    headers: list[Header]
    content: bytes | None
    upload: Any = None
    extensions: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] | None = None
    wants_signs: bool = False
    of_user: Any = None

    @classmethod
    def of(cls, request: http.Request) -> Message:
        """Return a user's request."""
        try:
            content: bytes | None = request.content
        except http.RequestNotRead:
            content = request.read() if _is_form(request) else None
        illegal = next((name for name, value in request.headers.raw if _ILLEGAL.search(name + value)), None)
        if illegal is not None:
            raise http.LocalProtocolError(f"the header {illegal!r} has a character that none may have")
        left_out = _OURS if content is not None else _OURS - {b"content-length"}
        return cls(
            method=request.method,
            target=request.url.raw_path,
            headers=[header for header in request.headers.raw if header[0].lower() not in left_out],
            content=content,
            upload=request.stream if content is None else None,
            extensions=request.extensions,
            wants_signs=SIGNS[0].decode() in request.headers,
            of_user=request,
        )

    @property
    def path(self) -> str:
        return self.target.partition(b"?")[0].decode("latin-1")

    def show(self, replica: ReplicaAddress) -> None:
        """Let the user see where the request goes, in errors and answers."""
        if self.of_user is not None:
            self.of_user.url = _url_at(self.target, replica.host, replica.port)

    # -- as it is sent

    def timeout_s(self, name: str) -> float | None:
        """Return a time limit of the user's."""
        seconds: float | None = (self.extensions.get("timeout") or {}).get(name)
        return seconds

    def head(self, of_replica: bytes) -> bytes:
        """Return all before the body. `of_replica` are the lines of each request to the replica that gets it."""
        lines = [b"%b: %b\r\n" % header for header in self.headers]
        content = self.content
        if content or (content is not None and self.method not in ("GET", "HEAD")):
            lines.append(b"content-length: %d\r\n" % len(content))
        return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (self.method.encode(), self.target, of_replica, b"".join(lines))


def lines_for(replica: ReplicaAddress) -> bytes:
    """Return the lines in the head of each request to a replica.

    The key is always the service's own: the SDK may have taken a key that is meant for OpenAI from the environment.
    """
    lines = f"host: {host_and_port(replica.host, replica.port)}\r\nauthorization: Bearer {replica.identity.api_key}\r\n"
    return lines.encode() + b"%b: %b\r\n" % SIGNS


@functools.lru_cache(maxsize=256)
def _url_at(target: bytes, host: str, port: int) -> http.URL:
    # Kept, as a new one costs fifty times as much, which is a good part of what a request costs here.
    return http.URL(scheme="https", host=host, port=port, raw_path=target)
