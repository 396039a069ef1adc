"""The gateway's own answers, in the form of OpenAI's errors: status, words, and when to try again. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_serve.client.replicas.sdk import http, openai
from hpc_serve.client.requests.exchange import NoReplicaError
from hpc_serve.errors import HpcServeError, StreamBrokenError

FULL_RETRY_S = 1
NO_REPLICA_RETRY_S = 5

JSON = (b"content-type", b"application/json")
_NOT_AGAIN: Mapping[str, str] = {"x-should-retry": "false"}  # read by OpenAI's SDKs


@dataclass(kw_only=True, eq=False)  # not frozen: Python notes on an exception where it was raised
class Refusal(Exception):
    """A request that gets an error of the gateway's own."""

    status: int
    code: str
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        content = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": content}, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [JSON, *((name.encode(), value.encode()) for name, value in self.headers.items())]


def too_much(code: str, message: str, retry_s: int = FULL_RETRY_S) -> Refusal:
    """Return the refusal of a request over a limit, which may come again in `retry_s` seconds."""
    headers = {"retry-after": str(retry_s)}
    return Refusal(status=429, code=code, kind="rate_limit_error", message=message, headers=headers)


def refusal_of(error: Exception, service: str) -> Refusal:
    """Return the gateway's answer to a request that no engine of `service` answered."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HpcServeError | NoReplicaError):
        headers = {"retry-after": str(NO_REPLICA_RETRY_S)}
        return Refusal(status=503, code="no_replica", kind="service_unavailable", message=str(error), headers=headers)
    if isinstance(error, openai.APITimeoutError | http.TimeoutException):
        text = f"{service} did not answer in time: {error}"
        return Refusal(status=504, code="timeout", kind="timeout", message=text, headers=_NOT_AGAIN)
    text = f"The request to {service} failed: {str(error) or type(error).__name__}"
    return Refusal(status=502, code="request_lost", kind="bad_gateway", message=text, headers=_NOT_AGAIN)


def broken_event(error: Exception) -> bytes:
    """Return the event that ends a broken stream. No `[DONE]` follows, since the answer is incomplete."""
    message = str(error) if isinstance(error, StreamBrokenError) else f"The stream broke: {error}"
    content = {"message": message, "type": "stream_broken", "param": None, "code": "stream_broken"}
    return b"data: " + json.dumps({"error": content}).encode() + b"\n\n"
