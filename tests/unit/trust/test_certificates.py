"""The certificates of a home, its runs, Ray and a gateway: what they may do, who trusts them, what spoils them."""

from __future__ import annotations

import builtins
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from hpc_serve.errors import InvalidRequestError, RecordError, StoreError
from hpc_serve.trust import certificates, making
from hpc_serve.trust.certificates import (
    REPLACING_VARIABLES,
    PeerFiles,
    authority_certificate,
    authority_file,
    certificates_of,
    ensure_authority,
    ensure_self_signed,
    make_peer_files,
    make_run_certificate,
    trust_variables,
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


# What other programs are told to trust: the system's or the site's authorities, and ours beside them


@pytest.fixture
def trusted(home: Path) -> Path:
    """A home with an authority."""
    ensure_authority(home)
    return home


@pytest.fixture
def site_file(tmp_path: Path) -> Path:
    """Some site's own bundle, of one authority."""
    ensure_authority(tmp_path / "site")
    path = tmp_path / "site's bundle.pem"
    path.write_text(f"# of this site\n{authority_certificate(tmp_path / 'site')}")
    return path


def holds(path: str) -> tuple[str, ...]:
    return certificates_of(Path(path).read_text())


def test_every_variable_names_a_private_file_that_holds_our_authority(trusted: Path) -> None:
    variables = trust_variables(trusted, {})
    assert set(variables) == {*REPLACING_VARIABLES, "NODE_EXTRA_CA_CERTS"}
    ours = authority_certificate(trusted)
    for path in variables.values():
        assert ours in holds(path)
        assert mode_of(Path(path)) == 0o600
        assert "PRIVATE" not in Path(path).read_text()
    assert holds(variables["NODE_EXTRA_CA_CERTS"]) == (ours,)


def test_the_systems_authorities_stay_trusted(trusted: Path, site_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_SYSTEM_BUNDLES", ("/nowhere/a.pem", str(site_file)))
    path = trust_variables(trusted, {})["SSL_CERT_FILE"]
    assert holds(path) == (*holds(str(site_file)), authority_certificate(trusted))


@pytest.mark.parametrize("variable", REPLACING_VARIABLES)
def test_what_the_site_chose_is_kept(trusted: Path, site_file: Path, variable: str) -> None:
    variables = trust_variables(trusted, {variable: str(site_file), "NODE_EXTRA_CA_CERTS": str(site_file)})
    for path in variables.values():
        assert holds(path) == (*holds(str(site_file)), authority_certificate(trusted))


def test_evaluated_again_it_keeps_what_it_was_made_from(trusted: Path, site_file: Path) -> None:
    environ = {"SSL_CERT_FILE": str(site_file), "NODE_EXTRA_CA_CERTS": str(site_file)}
    first = trust_variables(trusted, environ)
    contents = {path: Path(path).read_text() for path in first.values()}
    assert trust_variables(trusted, {**environ, **first}) == first
    assert {path: Path(path).read_text() for path in first.values()} == contents


def test_a_machine_without_any_gets_ours(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_system_bundles", lambda: iter(()))
    assert holds(trust_variables(trusted, {})["SSL_CERT_FILE"]) == (authority_certificate(trusted),)


def test_an_unchanged_file_is_left_alone(trusted: Path) -> None:
    path = Path(trust_variables(trusted, {})["SSL_CERT_FILE"])
    before = path.stat().st_ino
    trust_variables(trusted, {})
    assert path.stat().st_ino == before


def test_a_new_authority_replaces_the_old_one(trusted: Path) -> None:
    old = authority_certificate(trusted)
    trust_variables(trusted, {})
    (trusted / "authority" / "authority.pem").unlink()
    ensure_authority(trusted)
    path = trust_variables(trusted, {})["SSL_CERT_FILE"]
    assert authority_certificate(trusted) in holds(path)
    assert old not in holds(path)


def test_without_an_authority_there_is_nothing_to_trust(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"authority\.pem is missing"):
        trust_variables(tmp_path, {})


_PYTHON = """
import http.client, ssl, sys
connection = http.client.HTTPSConnection("127.0.0.1", int(sys.argv[1]), context=ssl.create_default_context())
connection.request("GET", "/")
print(connection.getresponse().read().decode(), end="")
"""
_NODE = """
require("https").get(`https://127.0.0.1:${process.argv[1]}/`, (answer) => answer.pipe(process.stdout))
"""
_PROGRAMS = {
    "curl": ["curl", "--silent", "--show-error", "--noproxy", "*", "https://127.0.0.1:{port}/"],
    "node": ["node", "-e", _NODE, "{port}"],
    "python": [sys.executable, "-c", _PYTHON, "{port}"],
}


@pytest.mark.parametrize("program", sorted(_PROGRAMS))
def test_programs_trust_an_endpoint_by_the_variables_alone(trusted: Path, tmp_path: Path, program: str) -> None:
    if shutil.which(_PROGRAMS[program][0]) is None:
        pytest.skip(f"{program} is not installed")
    plain = {"PATH": os.environ["PATH"]}
    with serving(made_in(trusted, tmp_path / "job")) as server:
        argv = [word.replace("{port}", str(server.port)) for word in _PROGRAMS[program]]
        refused, accepted = (
            subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
            for environ in (plain, plain | trust_variables(trusted, {}))
        )
    assert refused.returncode != 0
    assert (accepted.returncode, accepted.stdout, accepted.stderr) == (0, "ok", "")


# Ray's certificates: real gRPC lets in a node of the run and nobody else, whatever he shows


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def call(server: PeerFiles, *shown: bytes | None) -> str:
    """What a client with these three (authority, key, certificate) is told by a server of the run."""
    grpc: Any = pytest.importorskip("grpc")

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: object) -> object:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"come in")

    running = grpc.server(ThreadPoolExecutor(1))
    running.add_generic_rpc_handlers((Handler(),))
    pair = (server.key.read_bytes(), server.certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], server.authority.read_bytes(), require_client_auth=True)
    port = running.add_secure_port("127.0.0.1:0", credentials)
    running.start()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(*shown)) as channel:
            return channel.unary_unary("/any/Call")(b"", timeout=60).decode()
    except grpc.RpcError as error:
        return str(error.code())
    finally:
        running.stop(0)


def shown_by(files: PeerFiles) -> tuple[bytes, bytes, bytes]:
    return files.authority.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()


def test_nodes_of_one_run_know_each_other(run_dir, tmp_path):
    one, two = (make_peer_files(run_dir, tmp_path / name, addresses=["10.0.0.1"]) for name in ("n1", "n2"))
    assert one.authority.read_bytes() == two.authority.read_bytes()
    assert one.key.read_bytes() != two.key.read_bytes()
    assert call(one, *shown_by(two)) == "come in"


def test_nobody_else_is_let_in_nor_is_a_server_of_another_run_believed(run_dir, tmp_path):
    one = make_peer_files(run_dir, tmp_path / "n1", addresses=["10.0.0.1"])
    (tmp_path / "other").mkdir(mode=0o700)
    other = make_peer_files(tmp_path / "other", tmp_path / "n2", addresses=["10.0.0.1"])
    ours = one.authority.read_bytes()
    endpoint = make_run_certificate(tmp_path / "home", tmp_path / "n1", run="1-r0", addresses=["127.0.0.1"])
    shown = {
        "no certificate": (None, None),
        "another run's": shown_by(other)[1:],
        "the endpoint's": (endpoint.key_file.read_bytes(), endpoint.certificate_file.read_bytes()),
    }
    answers = {who: call(one, ours, *what) for who, what in shown.items()}
    assert answers == dict.fromkeys(shown, "StatusCode.UNAVAILABLE")
    assert call(other, *shown_by(one)) == "StatusCode.UNAVAILABLE"


def test_the_files_are_the_users_alone_and_the_nodes_have_no_authoritys_key(run_dir, tmp_path):
    files = make_peer_files(run_dir, tmp_path / "n1", addresses=["10.0.0.1"])
    made = [run_dir / "ray_authority.pem", files.authority, files.certificate, files.key]
    assert [mode_of(path) for path in made] == [0o600] * 4
    assert mode_of(files.key.parent) == 0o700
    assert b"PRIVATE" not in files.authority.read_bytes()


# A gateway's own certificate: the same until it lacks a name or ends, and a proof of one endpoint alone


NAMES, AT = ("login1", "login1.cluster"), ("127.0.0.1", "10.0.0.1")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "login1.pem"


@pytest.fixture
def gateways(path):
    """Returns the certificate for names and addresses."""
    return lambda names=NAMES, addresses=AT: ensure_self_signed(path, names=names, addresses=addresses)


def test_a_gateways_certificate_stays_the_same_while_it_holds_what_is_asked_for(gateways, path):
    first = gateways()
    assert mode_of(path) == 0o600
    assert gateways(names=NAMES[:1], addresses=AT[:1]) == first
    assert gateways(names=(*NAMES, "login1.other")) != first
    assert gateways(addresses=(*AT, "10.0.0.2")) != first


def test_a_gateways_certificate_is_made_anew_before_it_ends(gateways, monkeypatch):
    first, now = gateways(), making.now()
    monkeypatch.setattr(making, "now", lambda: now + making.RUN_LIFETIME - timedelta(days=91))
    assert gateways() == first
    monkeypatch.setattr(making, "now", lambda: now + making.RUN_LIFETIME - timedelta(days=89))
    assert gateways() != first


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_damaged_certificate_of_a_gateway_is_made_anew(gateways, path, text):
    path.write_text(text)
    path.chmod(0o600)
    assert "BEGIN CERTIFICATE" in gateways()


def test_a_gateways_certificate_whose_key_others_could_read_is_made_anew(gateways, path):
    first = gateways()
    path.chmod(0o644)
    assert gateways() != first
    assert mode_of(path) == 0o600


def test_a_gateway_signs_for_nobody_else(gateways):
    certificate = parsed(gateways())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.issuer == certificate.subject
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
