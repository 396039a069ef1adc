"""A pinned context on real sockets: the run's own certificate is accepted at any address, every other one is not."""

from __future__ import annotations

import http.client
import socket
import ssl
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.trust import authority, making
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import pinned_context, tls_refusal
from tests.support.tls_servers import RecordingServer, server_context


def make(tmp_path: Path, name: str) -> RunCertificate:
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    return make_run_certificate(tmp_path / "home", folder, run=f"{name}-r0", addresses=["10.1.2.3"])


def serving(shown: RunCertificate) -> closing[RecordingServer]:
    return closing(RecordingServer(server_context(shown.certificate_file, shown.key_file)))


def ask(server: RecordingServer, pinned: str) -> int:
    context = pinned_context(pinned)
    with closing(http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)) as connection:
        connection.request("GET", "/")
        return connection.getresponse().status


def test_tls_of_old_versions_is_refused(tmp_path: Path) -> None:
    ours = make(tmp_path, "ours")
    context = server_context(ours.certificate_file, ours.key_file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with closing(RecordingServer(context)) as server, pytest.raises(ssl.SSLError):
        ask(server, ours.certificate)
    assert server.received == b""


def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "RUN_LIFETIME", timedelta(hours=-1))
    ours = make(tmp_path, "ours")
    with serving(ours) as server, pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        ask(server, ours.certificate)
    assert server.received == b""


@pytest.mark.parametrize("hours", [-600, -20, 20, 48])
def test_a_certificate_holds_where_clocks_are_hours_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """`hours`: how far the clock of the engine's host is ahead. Two days are too many, and the clock is named."""
    made_at = making.now() + timedelta(hours=hours)
    monkeypatch.setattr(making, "now", lambda: made_at)
    ours = make(tmp_path, "ours")
    with serving(ours) as server:
        if hours < 24:
            assert ask(server, ours.certificate) == 200
            return
        with pytest.raises(ssl.SSLCertVerificationError) as refused:
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
