"""A connection is verified before it carries anything, by the certificate of the record."""

from __future__ import annotations

import http.client
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import Identity, NotOurEngineError, VerifiedConnection
from tests.support.relay import Relay
from tests.support.tls_servers import RecordingServer, server_context

KEY = "k-0123456789abcdef"


def ask(port: int, identity: Identity, *, host: str = "127.0.0.1", requests: int = 1) -> bytes:
    with closing(VerifiedConnection(host, port, identity, timeout_s=60)) as connection:
        for _ in range(requests):
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {identity.api_key}"})
            answer = connection.getresponse().read()
    return answer


@pytest.fixture
def ours(tmp_path: Path) -> RunCertificate:
    return make_run_certificate(tmp_path / "home", tmp_path, run="123-r0", addresses=[])


def pinned(ours: RunCertificate) -> Identity:
    return Identity(certificate=ours.certificate, api_key=KEY)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x16\x03\x01\x00\x05hello",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"x" * 100_000,
    ],
)
def test_whatever_a_stranger_answers_it_gets_no_key(ours: RunCertificate, answer: bytes) -> None:
    with closing(RecordingServer(answer=answer)) as server, pytest.raises(OSError):
        ask(server.port, pinned(ours))
    assert KEY.encode() not in server.received
    assert b"/v1/models" not in server.received


def test_a_stranger_that_says_nothing_is_left_in_time(ours: RunCertificate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = VerifiedConnection("127.0.0.1", listener.getsockname()[1], pinned(ours), timeout_s=0.2)
        with pytest.raises(TimeoutError):
            connection.connect()


def test_a_record_without_a_certificate_is_never_asked(ours: RunCertificate) -> None:
    with closing(RecordingServer()) as server, pytest.raises(RecordError, match="restart the service"):
        ask(server.port, replace(pinned(ours), certificate=""))
    assert KEY.encode() not in server.received


def test_the_key_is_not_in_a_repr(ours: RunCertificate) -> None:
    assert KEY not in repr(pinned(ours))


def test_the_certificate_is_what_counts(ours: RunCertificate) -> None:
    with closing(RecordingServer(server_context(ours.certificate_file, ours.key_file))) as server:
        assert ask(server.port, pinned(ours)) == b"ok"


@pytest.mark.parametrize("home", ["home", "other/home"])
def test_a_stranger_gets_nothing(ours: RunCertificate, tmp_path: Path, home: str) -> None:
    """Neither another run of the same authority, nor one of another authority."""
    folder = tmp_path / "other"
    folder.mkdir()
    theirs = make_run_certificate(tmp_path / home, folder, run="123-r0", addresses=[])
    refused = pytest.raises(NotOurEngineError, match="does not show the certificate of the record")
    with closing(RecordingServer(server_context(theirs.certificate_file, theirs.key_file))) as server, refused:
        ask(server.port, pinned(ours))
    assert server.received == b""


def test_a_relay_carries_what_it_cannot_read(ours: RunCertificate) -> None:
    server = RecordingServer(server_context(ours.certificate_file, ours.key_file))
    relay = Relay(server.port)
    try:
        assert ask(relay.port, pinned(ours)) == b"ok"
    finally:
        relay.close()
        server.close()
    assert KEY.encode() in server.received
    assert KEY.encode() not in relay.heard


def test_an_answer_in_the_clear_is_refused(ours: RunCertificate) -> None:
    with closing(RecordingServer()) as server, pytest.raises(NotOurEngineError, match="does not speak TLS"):
        ask(server.port, pinned(ours))
    assert KEY.encode() not in server.received


def test_a_connection_that_was_lost_is_verified_anew(ours: RunCertificate, tmp_path: Path) -> None:
    """http.client connects again by itself when the server has closed the connection."""
    server = RecordingServer(server_context(ours.certificate_file, ours.key_file))
    connection = VerifiedConnection("127.0.0.1", server.port, pinned(ours), timeout_s=60)
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"ok"
    connection.close()
    server.close()
    stranger = RecordingServer()
    connection.port = stranger.port
    try:
        with pytest.raises(NotOurEngineError):
            connection.request("GET", "/", headers={"Authorization": f"Bearer {KEY}"})
    finally:
        stranger.close()
    assert KEY.encode() not in stranger.received
    assert issubclass(NotOurEngineError, OSError)
    assert not issubclass(NotOurEngineError, http.client.HTTPException)
