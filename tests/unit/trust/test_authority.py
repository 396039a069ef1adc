"""The authority of a home and the certificates of its runs: what they may do, who may read them, what spoils them."""

from __future__ import annotations

import builtins
import socket
import ssl
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.trust import certificates
from hpc_serve.trust.certificates import (
    authority_certificate,
    authority_file,
    ensure_authority,
    make_run_certificate,
)
from tests.support.strangers import STRANGER, give_away
from tests.unit.trust.conftest import made_in, serving

ADDRESSES = {"10.77.0.11", "fd00::11"}


def parsed(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_authority_is_made_once(home: Path) -> None:
    first = ensure_authority(home).read_bytes()
    assert ensure_authority(home).read_bytes() == first
    assert mode_of(authority_file(home)) == 0o600
    assert mode_of(authority_file(home).parent) == 0o700


def test_makers_at_the_same_time_end_with_one_authority(home: Path) -> None:
    start = threading.Barrier(8)

    def make_one(_: int) -> str:
        start.wait()
        ensure_authority(home)
        return authority_certificate(home)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(make_one, range(8)))
    assert len(set(found)) == 1
    assert [path.name for path in authority_file(home).parent.iterdir()] == ["authority.pem"]


def test_the_authority_signs_for_addresses_and_localhost_alone(home: Path) -> None:
    ensure_authority(home)
    certificate = parsed(authority_certificate(home))
    limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical
    assert (limits.value.ca, limits.value.path_length) == (True, 0)
    names = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    assert names.critical
    assert names.value.permitted_subtrees is not None
    dns = [name.value for name in names.value.permitted_subtrees if isinstance(name, x509.DNSName)]
    assert dns == ["localhost"]
    assert certificate.not_valid_after_utc > datetime.now(timezone.utc) + timedelta(days=3650)


def test_a_run_certificate_names_every_address(home: Path, folder: Path) -> None:
    certificate = parsed(made_in(home, folder).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    assert addresses == ADDRESSES | {"127.0.0.1", "::1"}
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_run_certificate_holds_for_clocks_that_differ_and_long_jobs(home: Path, folder: Path) -> None:
    certificate = parsed(made_in(home, folder).certificate)
    now = datetime.now(timezone.utc)
    assert certificate.not_valid_before_utc <= now - timedelta(hours=23)
    assert now + timedelta(days=365) < certificate.not_valid_after_utc < now + timedelta(days=825)


def test_a_run_certificate_ends_with_its_authority(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_AUTHORITY_LIFETIME", timedelta(days=30))
    certificate = parsed(made_in(home, folder).certificate)
    assert certificate.not_valid_after_utc == parsed(authority_certificate(home)).not_valid_after_utc


def test_the_files_of_a_run_are_private_and_hold_what_is_told(home: Path, folder: Path) -> None:
    made = made_in(home, folder)
    assert made.certificate_file.read_text() == made.certificate
    assert mode_of(made.key_file) == mode_of(made.certificate_file) == 0o600
    assert made.key_file.parent == folder
    assert "PRIVATE" not in made.certificate
    assert "PRIVATE" not in repr(made)
    assert made_in(home, folder.parent / "other").key_file.read_text() != made.key_file.read_text()  # another run's
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.certificate_file, made.key_file)


def test_an_expired_authority_is_refused(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_AUTHORITY_LIFETIME", timedelta(hours=-1))
    ensure_authority(home)
    with pytest.raises(RecordError, match=r"expired on \d{4}-\d\d-\d\d\. Remove it"):
        made_in(home, folder)


@pytest.mark.parametrize("spoil", ["", "no PEM at all", "AAAA", "cut", "an endpoint's"])
def test_what_is_no_authority_is_refused(home: Path, folder: Path, spoil: str) -> None:
    made, path = made_in(home, folder), authority_file(home)
    contents = {
        "AAAA": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "cut": path.read_text()[:600],
        "an endpoint's": made.key_file.read_text() + made.certificate,
    }
    path.write_text(contents.get(spoil, spoil))
    with pytest.raises(RecordError, match="does not hold a key and the certificate"):
        made_in(home, folder)


def test_a_key_of_another_certificate_is_refused(home: Path, folder: Path, tmp_path: Path) -> None:
    ensure_authority(home)
    ensure_authority(tmp_path / "other")
    key, _, _ = authority_file(tmp_path / "other").read_text().partition("-----BEGIN CERTIFICATE-----")
    authority_file(home).write_text(key + authority_certificate(home))
    with pytest.raises(RecordError, match="its key is not that of its certificate"):
        made_in(home, folder)


@pytest.mark.parametrize("spoil", ["can be read by others", f"belongs to user {STRANGER}"])
def test_an_authority_of_others_is_refused(home: Path, folder: Path, spoil: str) -> None:
    path = ensure_authority(home)
    if spoil == "can be read by others":
        path.chmod(0o644)
    else:
        give_away(path)
    for use in (lambda: made_in(home, folder), lambda: authority_certificate(home)):
        with pytest.raises(RecordError, match=spoil):
            use()


def test_without_cryptography_it_says_what_to_install(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **options)

    monkeypatch.delitem(sys.modules, "hpc_serve.trust.making", raising=False)
    monkeypatch.delattr("hpc_serve.trust.making", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidRequestError, match="install it there"):
        made_in(home, folder)


def test_an_address_that_is_none_is_refused(home: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="not-an-address"):
        make_run_certificate(home, folder, run="1-r0", addresses=["not-an-address"])


def ask_by_boringssl(authority: str, port: int, name: str) -> str:
    """Why a gRPC client, which has BoringSSL, gets no answer from what is no gRPC server."""
    grpc = pytest.importorskip("grpc")
    credentials = grpc.ssl_channel_credentials(authority.encode())
    options = (("grpc.ssl_target_name_override", name),)
    at = f"127.0.0.1:{port}"
    with grpc.secure_channel(at, credentials, options=options) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/a/b")(b"", timeout=60)
    return str(refused.value.details())


@pytest.mark.parametrize(("name", "is_trusted"), [("127.0.0.1", True), ("localhost", True), ("www.example.org", False)])
def test_boringssl_takes_the_endpoint_and_no_web_site(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_trusted: bool
) -> None:
    ensure_authority(home)
    if not is_trusted:
        monkeypatch.setattr(certificates, "_LOCAL_NAME", name)  # of the certificate that is made now
    with serving(made_in(home, folder)) as server:
        why = ask_by_boringssl(authority_certificate(home), server.port, name)
    assert ("ALPN" in why) == is_trusted, why  # asked for once the certificate is accepted
    assert ("handshake failed" in why) != is_trusted, why


def test_a_client_that_trusts_the_authority_accepts_the_addresses(home: Path, folder: Path) -> None:
    """As other tools do, which check names: the loopback address is in every certificate, a strange name is not."""
    ours = made_in(home, folder)
    context = ssl.create_default_context(cadata=authority_certificate(home))
    if hasattr(ssl, "VERIFY_X509_STRICT"):  # the default from Python 3.13 on
        context.verify_flags |= ssl.VERIFY_X509_STRICT

    def version(name: str) -> str | None:
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            return context.wrap_socket(raw, server_hostname=name).version()

    with serving(ours) as server:
        assert version("127.0.0.1") == version("localhost") == "TLSv1.3"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            version("example.org")
