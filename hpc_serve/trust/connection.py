"""A connection to an engine, verified before anything else is sent: neither the key nor a prompt reaches a stranger.

Every new connection is verified, whatever answered at its address before. With TLS the engine shows the certificate
that its record names. In the clear (`--no-tls`) the engine proves that it holds the API key and that its connection
has the same two ends as ours, so nobody can pass the question on to another engine. Standard library alone.
"""

from __future__ import annotations

import hmac
import http.client
import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from hpc_serve.rendezvous.gate_headers import CHALLENGE_HEADER, PROOF_HEADER, is_within_one_host, prove_connection
from hpc_serve.rendezvous.host import host_id
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.trust.pinned import pinned_context

_READ_BYTES = 4_096
_MAX_ANSWER_BYTES = 16_384


class NotOurEngineError(ConnectionError):
    """What answers at the address is not the engine of the record. It was sent nothing secret."""


class WrongProofError(NotOurEngineError):
    """What answers holds another key, or passes on the proof of another connection."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """How the engine of a record shows that it is this engine: by its `certificate` (PEM), or without one by the key.

    `record` is the record's name. `host` is the `host_id` of the engine's host; with a certificate it is not asked for.
    """

    record: str
    certificate: str | None
    api_key: str = field(repr=False)
    host: str | None = None

    @classmethod
    def of(cls, record: EndpointRecord, api_key: str) -> Identity:
        return cls(record=record.name, certificate=record.certificate, api_key=api_key, host=record.host_id)


class VerifiedConnection(http.client.HTTPConnection):
    """An HTTP connection to the engine of `identity`; connecting raises NotOurEngineError if it is another program.

    It ignores proxy variables, as all of `http.client` does.
    """

    def __init__(self, host: str, port: int, identity: Identity, *, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._identity = identity
        self._timeout_s = timeout_s

    def connect(self) -> None:
        super().connect()
        try:
            self.sock = verify_socket(self.sock, self._identity, timeout_s=self._timeout_s)
        except BaseException:
            self.close()
            raise


def verify_socket(connected: socket.socket, identity: Identity, *, timeout_s: float) -> socket.socket:
    """The socket to use from now on, once the other end has shown that it is the engine of `identity`.

    Raises NotOurEngineError, or another OSError if no answer comes within `timeout_s` seconds or the connection breaks.
    """
    if identity.certificate is not None:
        return _verify_by_certificate(connected, identity.certificate)
    challenge = make_challenge(identity, client=connected.getsockname(), server=connected.getpeername())
    deadline_s = time.monotonic() + timeout_s
    connected.sendall(challenge.request)
    while not challenge.is_answered:
        connected.settimeout(max(deadline_s - time.monotonic(), 0.001))
        challenge.read(connected.recv(_READ_BYTES))
    connected.settimeout(timeout_s)
    return connected


def _verify_by_certificate(connected: socket.socket, certificate: str) -> socket.socket:
    try:
        return pinned_context(certificate).wrap_socket(connected)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # an engine that ends does this too
        raise
    except ssl.SSLError as error:
        raise NotOurEngineError(tls_refusal(error)) from error


def tls_refusal(error: ssl.SSLError) -> str:
    """Why a handshake failed, for a person."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"it does not show the certificate of the record ({error.verify_message})"
    return f"it does not speak TLS as the engine of the record does ({error.reason or error})"


def make_challenge(identity: Identity, *, client: Sequence[Any], server: Sequence[Any]) -> Challenge:
    """The challenge for a connection in the clear; `client` and `server` are its two ends, as our socket names them.

    Raises NotOurEngineError if both ends are on this host and the engine is on another. A stranger on each host could
    then pass the challenge on between two connections of the same addresses and ports.
    """
    if is_within_one_host(client, server) and (identity.host is None or identity.host != host_id()):
        raise NotOurEngineError(
            f"the engine is on another host, or in another network namespace, than {server[0]} here"
        )
    nonce = secrets.token_hex(16)
    request = (
        f"GET /health HTTP/1.1\r\nHost: engine\r\nAccept: */*\r\n{CHALLENGE_HEADER.decode()}: {nonce}\r\n\r\n".encode()
    )
    key = identity.api_key.encode()
    proof = prove_connection(key, nonce.encode(), identity.record, host=identity.host, client=client, server=server)
    return Challenge(request, proof)


class Challenge:
    """A `request` to send on a new connection; what comes back is handed to `read` until it `is_answered`."""

    def __init__(self, request: bytes, expected_proof: bytes) -> None:
        self.request = request
        self.is_answered = False
        self._expected_proof = expected_proof
        self._received = b""

    def read(self, received: bytes) -> None:
        """Take what the other end sent. Raises NotOurEngineError as soon as it is not the answer of our engine."""
        if not received:
            raise ConnectionResetError("the connection was closed before the engine proved itself")
        self._received += received
        head, end, body = self._received.partition(b"\r\n\r\n")
        if end:
            headers = _parse_head(head + end)
            self._check_proof(headers)
            length = _content_length(headers)
            if len(body) > length:
                raise NotOurEngineError("it sends more than an answer")
            self.is_answered = len(body) == length
        elif len(self._received) > _MAX_ANSWER_BYTES:
            raise NotOurEngineError("it does not answer as an engine does")

    def _check_proof(self, headers: http.client.HTTPMessage) -> None:
        proof = headers.get(PROOF_HEADER.decode(), "").encode("latin-1", "replace")
        if not proof:
            raise NotOurEngineError("it does not prove that it holds the key of the service")
        if not hmac.compare_digest(proof, self._expected_proof):
            raise WrongProofError("its proof is not that of the service's key on this connection")


def _parse_head(head: bytes) -> http.client.HTTPMessage:
    status, _, rest = head.partition(b"\r\n")
    if not status.startswith(b"HTTP/1.1 "):
        raise NotOurEngineError("it does not answer as an engine does")
    try:
        return http.client.parse_headers(BytesIO(rest))
    except http.client.HTTPException as error:
        raise NotOurEngineError("it does not answer as an engine does") from error


def _content_length(headers: http.client.HTTPMessage) -> int:
    length = headers.get("content-length", "")
    if not length.isascii() or not length.isdigit() or int(length[:9]) > _MAX_ANSWER_BYTES:
        raise NotOurEngineError("it does not answer as an engine does")
    if headers.get("connection", "").lower() == "close":
        raise NotOurEngineError("it does not keep the connection that it proved itself on")
    return int(length)
