"""Lets other programs trust a home's endpoints: files of certificates, and the variables that name them.

A variable like SSL_CERT_FILE replaces what a program trusts, so its file holds the system's authorities beside ours.
Standard library alone.
"""

from __future__ import annotations

import importlib
import os
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.files import read_private, write_private
from hpc_serve.trust.authority import authority_certificate, certificates_of

REPLACING_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Read by OpenSSL (and Go and Python), by Python's requests, and by curl: each in place of the system's authorities."""
ADDING_VARIABLE = "NODE_EXTRA_CA_CERTS"
"""Read by Node.js beside its own authorities."""

_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat and its kin
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, macOS
)
_MADE_FROM = "# made from: "
_LONGEST_BUNDLE = 16 << 20


def trust_variables(home: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Write the files of `home` and return the variables that make other programs trust its endpoints.

    `environ` says what is trusted now. Raises StoreError (without an authority, too) or RecordError.
    """
    certificate = authority_certificate(home)
    folder = home / "authority"
    replacing, adding = folder / "bundle.pem", folder / "certificate.pem"
    chosen = [value for name in REPLACING_VARIABLES if (value := environ.get(name))]
    _write_with(certificate, replacing, [*_originals(chosen, replacing), *_system_bundles()])
    _write_with(certificate, adding, _originals([environ.get(ADDING_VARIABLE, "")], adding))
    return {**dict.fromkeys(REPLACING_VARIABLES, str(replacing)), ADDING_VARIABLE: str(adding)}


def with_systems(certificate: str) -> str:
    """Return the certificates that the system trusts, and `certificate` after them."""
    systems: tuple[str, ...] = next(filter(None, map(_read_certificates, _system_bundles())), ())
    return "".join((*systems, certificate))


def _write_with(certificate: str, path: Path, sources: Iterable[Path]) -> None:
    """Write `certificate` to `path`, after those of the first source that holds any."""
    text = certificate
    for source in sources:
        if trusted := _read_certificates(source):
            text = f"{_MADE_FROM}{source}\n{''.join(trusted)}{certificate}"
            break
    _write_changed(path, text)


def _originals(chosen: Iterable[str], ours: Path) -> Iterator[Path]:
    """Yield the files that a person or site chose. For a file of ours, yield the file that it was made from."""
    for path in map(Path, filter(None, chosen)):
        if path != ours:
            yield path
        elif (original := _made_from(ours)) is not None:
            yield original


def _system_bundles() -> Iterator[Path]:
    yield from map(Path, _SYSTEM_BUNDLES)
    yield Path(ssl.get_default_verify_paths().openssl_cafile)
    try:
        yield Path(importlib.import_module("certifi").where())
    except (ImportError, AttributeError):
        return


def _made_from(bundle: Path) -> Path | None:
    try:
        with open(bundle, errors="replace") as file:
            line = file.readline()
    except OSError:
        return None
    return Path(line[len(_MADE_FROM) :].rstrip("\n")) if line.startswith(_MADE_FROM) else None


def _read_certificates(path: Path) -> tuple[str, ...]:
    try:
        with open(path, errors="replace") as file:
            return certificates_of(file.read(_LONGEST_BUNDLE))
    except OSError:
        return ()


def _write_changed(path: Path, text: str) -> None:
    """Programs that run now read it: it is replaced as a whole, and only if something is new."""
    try:
        if os.path.getsize(path) == len(text.encode()) and read_private(path) == text:
            return
    except (OSError, HpcServeError):
        pass
    write_private(path, text)


def authority_alone(home: Path) -> Path:
    """The file of the authority's certificate and no other, made if it is missing, for programs that trust one file.

    Raises StoreError (without an authority, too) or RecordError.
    """
    path = home / "authority" / "own.pem"
    _write_changed(path, authority_certificate(home))
    return path
