"""What other programs are told to trust: the system's or the site's authorities, and ours beside them."""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.errors import StoreError
from hpc_serve.trust import certificates
from hpc_serve.trust.certificates import (
    REPLACING_VARIABLES,
    authority_certificate,
    certificates_of,
    ensure_authority,
    trust_variables,
)
from tests.unit.trust.conftest import made_in, serving


@pytest.fixture
def home(home: Path) -> Path:
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


def test_every_variable_names_a_private_file_that_holds_our_authority(home: Path) -> None:
    variables = trust_variables(home, {})
    assert set(variables) == {*REPLACING_VARIABLES, "NODE_EXTRA_CA_CERTS"}
    ours = authority_certificate(home)
    for path in variables.values():
        assert ours in holds(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert "PRIVATE" not in Path(path).read_text()
    assert holds(variables["NODE_EXTRA_CA_CERTS"]) == (ours,)


def test_the_systems_authorities_stay_trusted(home: Path, site_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_SYSTEM_BUNDLES", ("/nowhere/a.pem", str(site_file)))
    path = trust_variables(home, {})["SSL_CERT_FILE"]
    assert holds(path) == (*holds(str(site_file)), authority_certificate(home))


@pytest.mark.parametrize("variable", REPLACING_VARIABLES)
def test_what_the_site_chose_is_kept(home: Path, site_file: Path, variable: str) -> None:
    variables = trust_variables(home, {variable: str(site_file), "NODE_EXTRA_CA_CERTS": str(site_file)})
    for path in variables.values():
        assert holds(path) == (*holds(str(site_file)), authority_certificate(home))


def test_evaluated_again_it_keeps_what_it_was_made_from(home: Path, site_file: Path) -> None:
    environ = {"SSL_CERT_FILE": str(site_file), "NODE_EXTRA_CA_CERTS": str(site_file)}
    first = trust_variables(home, environ)
    contents = {path: Path(path).read_text() for path in first.values()}
    assert trust_variables(home, {**environ, **first}) == first
    assert {path: Path(path).read_text() for path in first.values()} == contents


def test_a_file_that_is_not_there_is_passed_over(home: Path, site_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_SYSTEM_BUNDLES", (str(site_file),))
    path = trust_variables(home, {"SSL_CERT_FILE": "/nowhere/at/all.pem"})["SSL_CERT_FILE"]
    assert holds(str(site_file))[0] in holds(path)


def test_a_machine_without_any_gets_ours(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_system_bundles", lambda: iter(()))
    assert holds(trust_variables(home, {})["SSL_CERT_FILE"]) == (authority_certificate(home),)


def test_an_unchanged_file_is_left_alone(home: Path) -> None:
    path = Path(trust_variables(home, {})["SSL_CERT_FILE"])
    before = path.stat().st_ino
    trust_variables(home, {})
    assert path.stat().st_ino == before


def test_a_new_authority_replaces_the_old_one(home: Path) -> None:
    old = authority_certificate(home)
    trust_variables(home, {})
    (home / "authority" / "authority.pem").unlink()
    ensure_authority(home)
    path = trust_variables(home, {})["SSL_CERT_FILE"]
    assert authority_certificate(home) in holds(path)
    assert old not in holds(path)


def test_without_an_authority_there_is_nothing_to_trust(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"authority\.pem is missing"):
        trust_variables(tmp_path, {})


def test_the_whole_bundle_can_be_loaded(home: Path) -> None:
    context = ssl.create_default_context(cafile=trust_variables(home, {})["SSL_CERT_FILE"])
    assert context.cert_store_stats()["x509_ca"] >= 1


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
def test_programs_trust_an_endpoint_by_the_variables_alone(home: Path, tmp_path: Path, program: str) -> None:
    if shutil.which(_PROGRAMS[program][0]) is None:
        pytest.skip(f"{program} is not installed")
    plain = {"PATH": os.environ["PATH"]}
    with serving(made_in(home, tmp_path / "job")) as server:
        argv = [word.replace("{port}", str(server.port)) for word in _PROGRAMS[program]]
        refused, accepted = (
            subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
            for environ in (plain, plain | trust_variables(home, {}))
        )
    assert refused.returncode != 0
    assert (accepted.returncode, accepted.stdout, accepted.stderr) == (0, "ok", "")
