"""A connection is verified before it carries anything: the certificate of the record counts, at any address."""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.trust import making
from hpc_serve.trust.certificates import RunCertificate
from hpc_serve.trust.connection import Identity, NotOurEngineError, VerifiedConnection, pinned_context
from tests.support.tls_servers import RecordingServer, server_context
from tests.unit.trust.conftest import made_in, serving

KEY = "k-0123456789abcdef"


def connection_to(port: int, certificate: str, *, timeout_s: float = 60) -> VerifiedConnection:
    return VerifiedConnection("127.0.0.1", port, Identity(certificate=certificate, api_key=KEY), timeout_s=timeout_s)


def ask(port: int, certificate: str) -> bytes:
    with closing(connection_to(port, certificate)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        return connection.getresponse().read()


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
        ask(server.port, ours.certificate)
    assert KEY.encode() not in server.received
    assert b"/v1/models" not in server.received


def test_a_stranger_that_says_nothing_is_left_in_time(ours: RunCertificate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        connection_to(listener.getsockname()[1], ours.certificate, timeout_s=0.2).connect()


@pytest.mark.parametrize(
    "text", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\x00ü"]
)
def test_a_record_without_a_certificate_is_never_asked(text: str) -> None:
    with closing(RecordingServer()) as server:
        with pytest.raises(RecordError, match=r"certificate cannot be read .* restart the service"):
            ask(server.port, text)
        assert server.received == b""


def test_the_key_is_not_in_a_repr() -> None:
    assert KEY not in repr(Identity(certificate="", api_key=KEY))


@pytest.mark.parametrize("authority", ["home", "other/home"])
def test_a_stranger_gets_nothing(ours: RunCertificate, tmp_path: Path, authority: str) -> None:
    """Neither another run of the same authority, nor one of another authority."""
    refused = pytest.raises(NotOurEngineError, match="does not show the certificate of the record")
    with serving(made_in(tmp_path / authority, tmp_path / "theirs")) as server, refused:
        ask(server.port, ours.certificate)
    assert server.received == b""


def test_an_answer_in_the_clear_is_refused(ours: RunCertificate) -> None:
    with closing(RecordingServer()) as server, pytest.raises(NotOurEngineError, match="does not speak TLS"):
        ask(server.port, ours.certificate)
    assert KEY.encode() not in server.received


def test_tls_of_old_versions_is_refused(ours: RunCertificate) -> None:
    context = server_context(ours.certificate_file, ours.key_file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with closing(RecordingServer(context)) as server, pytest.raises(NotOurEngineError, match="does not speak TLS"):
        ask(server.port, ours.certificate)
    assert server.received == b""


def test_a_connection_that_was_lost_is_verified_anew(ours: RunCertificate) -> None:
    """http.client connects again by itself when the server has closed the connection."""
    with serving(ours) as server:
        connection = connection_to(server.port, ours.certificate)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b"ok"
        connection.close()
    with closing(RecordingServer()) as stranger:
        connection.port = stranger.port
        with pytest.raises(NotOurEngineError):
            connection.request("GET", "/", headers={"Authorization": f"Bearer {KEY}"})
    assert KEY.encode() not in stranger.received
    assert issubclass(NotOurEngineError, OSError)
    assert not issubclass(NotOurEngineError, http.client.HTTPException)


@pytest.mark.parametrize(
    ("hours", "says"), [(-600, ""), (-20, ""), (20, ""), (48, "not yet valid"), (-24 * 731, "has expired")]
)
def test_a_certificate_holds_where_clocks_are_hours_off(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, hours: int, says: str
) -> None:
    """`hours`: how far the clock of the engine's host is ahead. Two days are too many, and the clock is named."""
    made_at = making.now() + timedelta(hours=hours)
    monkeypatch.setattr(making, "now", lambda: made_at)
    ours = made_in(home, folder)
    with serving(ours) as server:
        if not says:
            assert ask(server.port, ours.certificate) == b"ok"
            return
        with pytest.raises(NotOurEngineError) as refused:
            ask(server.port, ours.certificate)
    assert str(refused.value).startswith("by this host's clock its certificate does not hold (certificate ")
    assert f"{says}): compare the clocks" in str(refused.value)
    assert server.received == b""


def test_a_context_is_made_once_for_each_certificate(ours: RunCertificate, tmp_path: Path) -> None:
    other = made_in(tmp_path / "home", tmp_path / "other")
    assert pinned_context(ours.certificate) is pinned_context(ours.certificate)
    assert pinned_context(ours.certificate) is not pinned_context(other.certificate)
