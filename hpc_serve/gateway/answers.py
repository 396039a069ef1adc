"""The gateway's own answers, in the form of OpenAI's errors: status, words, and when to try again. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_serve.client.connections.message import Header
from hpc_serve.client.replicas.sdk import http, openai
from hpc_serve.client.requests.exchange import NoReplicaError
from hpc_serve.errors import HpcServeError, StreamBrokenError, error_text

JSON = (b"content-type", b"application/json")
_NOT_AGAIN = ((b"x-should-retry", b"false"),)  # read by OpenAI's SDKs
_KINDS = {429: "rate_limit_error", 502: "bad_gateway", 503: "service_unavailable", 504: "timeout"}
_RETRY_S = {429: 1, 503: 5}
"""When to try again after a refusal that names no other time, by its status."""


@dataclass(kw_only=True, eq=False)  # not frozen: Python notes on an exception where it was raised
class Refusal(Exception):
    """A request that gets an error of the gateway's own. It may come again in `retry_s` seconds."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_s: int | None = None
    headers: Sequence[Header] = ()

    @property
    def body(self) -> bytes:
        kind = _KINDS.get(self.status, "invalid_request_error")
        content = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": content}, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @property
    def raw_headers(self) -> list[Header]:
        retry_s = self.retry_s or _RETRY_S.get(self.status)
        return [JSON, *([(b"retry-after", b"%d" % retry_s)] if retry_s else ()), *self.headers]


def refusal_of(error: Exception, service: str) -> Refusal:
    """Return the gateway's answer to a request that no engine of `service` answered."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HpcServeError | NoReplicaError):
        return Refusal(status=503, code="no_replica", message=str(error))
    if isinstance(error, openai.APITimeoutError | http.TimeoutException):
        text = f"{service} did not answer in time: {error}"
        return Refusal(status=504, code="timeout", message=text, headers=_NOT_AGAIN)
    text = f"The request to {service} failed: {error_text(error)}"
    return Refusal(status=502, code="request_lost", message=text, headers=_NOT_AGAIN)


def broken_event(error: Exception) -> bytes:
    """Return the event that ends a broken stream. No `[DONE]` follows, since the answer is incomplete."""
    message = str(error) if isinstance(error, StreamBrokenError) else f"The stream broke: {error}"
    content = {"message": message, "type": "stream_broken", "param": None, "code": "stream_broken"}
    return b"data: " + json.dumps({"error": content}).encode() + b"\n\n"
