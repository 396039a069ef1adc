"""A pinned context on real sockets: the run's own certificate is accepted at any address, every other one is not."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.trust import authority, making
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import tls_refusal
from hpc_serve.trust.pinned import pinned_context
from tests.support.tls_servers import RecordingServer, server_context

SECRET = "a-key-that-must-not-leave"


def make(tmp_path: Path, name: str, *, home: str = "home") -> RunCertificate:
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    return make_run_certificate(tmp_path / home, folder, run=f"{name}-r0", addresses=["10.1.2.3"])


@contextmanager
def serving(shown: RunCertificate | None) -> Iterator[RecordingServer]:
    context = server_context(shown.certificate_file, shown.key_file) if shown is not None else None
    server = RecordingServer(context)
    try:
        yield server
    finally:
        server.close()


def ask(server: RecordingServer, pinned: str) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=pinned_context(pinned))
    try:
        connection.request("GET", "/", headers={"Authorization": f"Bearer {SECRET}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_pinned_certificate_is_accepted(tmp_path: Path) -> None:
    ours = make(tmp_path, "ours")
    with serving(ours) as server:
        assert ask(server, ours.certificate) == 200
        assert SECRET.encode() in server.received


@pytest.mark.parametrize("home", ["home", "other"])
def test_another_certificate_gets_nothing(tmp_path: Path, home: str) -> None:
    """Neither that of another run of the same authority, nor that of another authority."""
    ours, theirs = make(tmp_path, "ours"), make(tmp_path, "theirs", home=home)
    with serving(theirs) as server, pytest.raises(ssl.SSLCertVerificationError):
        ask(server, ours.certificate)
    assert server.connections == 1
    assert server.received == b""


def test_a_server_in_the_clear_gets_nothing_but_a_greeting(tmp_path: Path) -> None:
    ours = make(tmp_path, "ours")
    with serving(None) as server, pytest.raises((ssl.SSLError, ConnectionError)):
        ask(server, ours.certificate)
    assert SECRET.encode() not in server.received
    assert b"HTTP" not in server.received


def test_the_certificate_without_its_key_is_worth_nothing(tmp_path: Path) -> None:
    ours, theirs = make(tmp_path, "ours"), make(tmp_path, "theirs")
    with pytest.raises(ssl.SSLError):
        server_context(ours.certificate_file, theirs.key_file)


def test_tls_of_old_versions_is_refused(tmp_path: Path) -> None:
    ours = make(tmp_path, "ours")
    context = server_context(ours.certificate_file, ours.key_file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    server = RecordingServer(context)
    try:
        with pytest.raises(ssl.SSLError):
            ask(server, ours.certificate)
    finally:
        server.close()
    assert server.received == b""


def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "RUN_LIFETIME", timedelta(hours=-1))
    ours = make(tmp_path, "ours")
    with serving(ours) as server, pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        ask(server, ours.certificate)
    assert server.received == b""


@pytest.mark.parametrize("hours", [-600, -20, 20])
def test_a_certificate_holds_where_clocks_are_hours_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """`hours`: how far the clock of the engine's host is ahead."""
    made_at = making.now() + timedelta(hours=hours)
    monkeypatch.setattr(making, "now", lambda: made_at)
    ours = make(tmp_path, "ours")
    with serving(ours) as server:
        assert ask(server, ours.certificate) == 200


def test_a_clock_that_is_two_days_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_at = making.now() + timedelta(days=2)
    monkeypatch.setattr(making, "now", lambda: made_at)
    ours = make(tmp_path, "ours")
    with serving(ours) as server, pytest.raises(ssl.SSLCertVerificationError) as refused:
        ask(server, ours.certificate)
    said = "by this host's clock its certificate does not hold (certificate is not yet valid): compare the clocks"
    assert tls_refusal(refused.value) == said
    assert server.received == b""


def test_a_context_is_made_once_for_each_certificate(tmp_path: Path) -> None:
    ours, other = make(tmp_path, "ours"), make(tmp_path, "other")
    assert pinned_context(ours.certificate) is pinned_context(ours.certificate)
    assert pinned_context(ours.certificate) is not pinned_context(other.certificate)


@pytest.mark.parametrize(
    "text", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\x00ü"]
)
def test_what_is_no_certificate_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="certificate cannot be read"):
        pinned_context(text)


def test_a_client_that_trusts_the_authority_accepts_the_addresses(tmp_path: Path) -> None:
    """As other tools do, which check names: the loopback address is in every certificate, a strange name is not."""
    ours = make(tmp_path, "ours")
    context = ssl.create_default_context(cadata=authority.authority_certificate(tmp_path / "home"))
    if hasattr(ssl, "VERIFY_X509_STRICT"):  # the default from Python 3.13 on
        context.verify_flags |= ssl.VERIFY_X509_STRICT

    def version(name: str) -> str | None:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            return context.wrap_socket(raw, server_hostname=name).version()

    with serving(ours) as server:
        assert version("127.0.0.1") == version("localhost") == "TLSv1.3"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            version("example.org")
