"""The certificates of a home: who signs each, what it holds, where it lies, and how other programs come to trust it.

The home's private authority signs a certificate for the endpoint of each run. The Ray of each run has a separate
authority in the run's private folder, so a certificate of another run is not accepted. A gateway that serves people of
other accounts has a certificate that is signed by its own key: the home's authority would vouch for more than that. It
stays the same as long as it can, so that copies stay good. A variable like SSL_CERT_FILE replaces what a program
trusts, so its file holds the system's authorities beside ours. `making` needs the `cryptography` package, and is
imported where a certificate is made; a program that only trusts them needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private, write_private

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def certificates_of(text: str) -> tuple[str, ...]:
    """The certificates in `text`, each as PEM with 64 characters a line; a block that is no base64 is left out."""
    found = []
    for match in _CERTIFICATE.finditer(text):
        with contextlib.suppress(ValueError):
            found.append(ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(match[0])))
    return tuple(dict.fromkeys(found))


# -- the authority of a home, and the certificates of its runs

_AUTHORITY_LIFETIME = timedelta(days=20 * 365)
_ALWAYS = ("127.0.0.1", "::1")
_LOCAL_NAME = "localhost"


@dataclass(frozen=True, kw_only=True)
class RunCertificate:
    """The certificate that an endpoint shows (PEM, public), and the 0600 files that its server reads."""

    certificate: str
    certificate_file: Path
    key_file: Path


def authority_file(home: Path) -> Path:
    return home / "authority" / "authority.pem"


def ensure_authority(home: Path) -> Path:
    """Return the file of the home's authority, made if it is missing; two makers at once end with one authority.

    It may sign for IP addresses and localhost, not for other names: a program that trusts it still asks others than
    its holder who a web site is. A name of localhost alone says so: constraints bind the kinds of names that they
    list. One that lists all addresses as well is refused by BoringSSL ("unsupported name constraint type").
    Raises StoreError, RecordError (the file there is not usable), or InvalidRequestError without `cryptography`.
    """
    path = authority_file(home)
    make_private_folder(home, tighten=False)
    make_private_folder(path.parent)
    if not path.exists():
        from hpc_serve.trust import making

        # Names of their own: two authorities of one name confuse whoever looks for an issuer by its name.
        name = f"hpc-serve authority {secrets.token_hex(4)}"
        create_private(path, making.new_authority(name, lifetime=_AUTHORITY_LIFETIME, signs_for=_LOCAL_NAME))
    return path


def authority_certificate(home: Path) -> str:
    """Return the authority's certificate, as PEM. Raises StoreError (there is none) or RecordError."""
    path = authority_file(home)
    try:
        found = certificates_of(read_private(path, secret=True))
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the next job makes one; restart the services that run.") from None
    if len(found) != 1:
        raise _unusable(path, f"it holds {len(found)} certificates instead of one")
    return found[0]


def make_run_certificate(home: Path, folder: Path, *, run: str, addresses: Iterable[str]) -> RunCertificate:
    """Make a key and a certificate for a run's endpoint at `addresses` (IPs), as files in the run's private folder.

    The certificate also holds for the loopback addresses and the name localhost, for tunnels.
    Raises StoreError, RecordError or InvalidRequestError as `ensure_authority` does.
    """
    from hpc_serve.trust import making

    path = ensure_authority(home)
    names = making.names([_LOCAL_NAME], (*addresses, *_ALWAYS))
    try:
        key, certificate = making.issue(read_private(path, secret=True), f"hpc-serve {run}"[:64], names)
    except ValueError as error:
        raise _unusable(path, str(error)) from error
    made = RunCertificate(
        certificate=certificate, certificate_file=folder / "endpoint.pem", key_file=folder / "endpoint.key"
    )
    write_private(made.key_file, key)
    write_private(made.certificate_file, certificate)
    return made


def _unusable(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} cannot sign certificates: {why}. Remove it to have a new one made by the next job, and run "
        "`hpc-serve env` again where other tools than Python's client talk to a service."
    )


# -- the processes of one run's Ray

_NAME = "hpc-serve run"


@dataclass(frozen=True, kw_only=True)
class PeerFiles:
    """The 0600 files that a process of the run reads: the trusted authority, its certificate, and the key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> PeerFiles:
        """Return the paths at which `make_peer_files` writes them."""
        return cls(authority=folder / "authority.pem", certificate=folder / "node.pem", key=folder / "node.key")


def make_peer_files(run_dir: Path, folder: Path, *, addresses: Iterable[str]) -> PeerFiles:
    """Make a key and a certificate for this node at `addresses` (and the loopback address), in its private `folder`.

    The run's authority is made in `run_dir` if it is missing; two nodes at once end with one. Raises StoreError,
    RecordError, or InvalidRequestError without `cryptography`.
    """
    from hpc_serve.trust import making

    path = run_dir / "ray_authority.pem"
    if not path.exists():  # it may sign for anybody, since only this run trusts it
        create_private(path, making.new_authority(f"{_NAME} authority", lifetime=making.RUN_LIFETIME))
    authority = read_private(path, secret=True)
    names = making.names((), (*addresses, "127.0.0.1"))
    try:
        key, certificate = making.issue(authority, _NAME, names, is_for_clients=True)
    except ValueError as error:
        raise RecordError(f"{path} does not hold the authority of this run: start the job again.") from error
    make_private_folder(folder)
    files = PeerFiles.in_folder(folder)
    write_private(files.authority, "".join(certificates_of(authority)))
    write_private(files.certificate, certificate)
    write_private(files.key, key)
    return files


# -- the certificate of a gateway

_RENEWED_BEFORE_END = timedelta(days=90)


def ensure_self_signed(path: Path, *, names: Collection[str], addresses: Collection[str]) -> str:
    """Return the certificate (PEM) of the key in `path`, for these host names and IP addresses.

    The file holds both, 0600. It is made anew if it is missing, unusable or not secret, lacks a name, or ends within 90
    days. Raises StoreError, or InvalidRequestError without `cryptography`.
    """
    from hpc_serve.trust import making

    wanted = making.names(names, addresses)
    try:
        held = read_private(path, secret=True)
        (found,) = certificates_of(held)
        held_names, ends_at = making.names_and_end(found)
        if ends_at - making.now() > _RENEWED_BEFORE_END and set(wanted) <= set(held_names):
            return found
    except (FileNotFoundError, ValueError):
        pass
    # Two certificates of one name confuse a search by name.
    text = making.self_signed(f"hpc-serve gateway {secrets.token_hex(4)}", wanted)
    write_private(path, text)
    (made,) = certificates_of(text)
    return made


# -- other programs

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
    for path, sources in (
        (replacing, [*_originals(chosen, replacing), *_system_bundles()]),
        (adding, _originals([environ.get(ADDING_VARIABLE, "")], adding)),
    ):
        source, trusted = _first_trusted(sources)
        _write_changed(path, source + trusted + certificate)
    return {**dict.fromkeys(REPLACING_VARIABLES, str(replacing)), ADDING_VARIABLE: str(adding)}


def with_systems(certificate: str) -> str:
    """Return the certificates that the system trusts, and `certificate` after them."""
    _, systems = _first_trusted(_system_bundles())
    return systems + certificate


def _first_trusted(sources: Iterable[Path]) -> tuple[str, str]:
    """Return a line that names the first source with certificates, and its certificates; both empty without one."""
    for source in sources:
        if trusted := certificates_of(_read(source)):
            return f"{_MADE_FROM}{source}\n", "".join(trusted)
    return "", ""


def _originals(chosen: Iterable[str], ours: Path) -> Iterator[Path]:
    """Yield the files that a person or site chose. For a file of ours, yield the file that it was made from."""
    for path in map(Path, filter(None, chosen)):
        if path != ours:
            yield path
        elif (line := _read(ours).partition("\n")[0]).startswith(_MADE_FROM):
            yield Path(line.removeprefix(_MADE_FROM))


def _system_bundles() -> Iterator[Path]:
    yield from map(Path, _SYSTEM_BUNDLES)
    yield Path(ssl.get_default_verify_paths().openssl_cafile)
    try:
        yield Path(importlib.import_module("certifi").where())
    except (ImportError, AttributeError):
        return


def _read(bundle: Path) -> str:
    try:
        with open(bundle, errors="replace") as file:
            return file.read(_LONGEST_BUNDLE)
    except OSError:
        return ""


def _write_changed(path: Path, text: str) -> None:
    """Programs that run now read it: it is replaced as a whole, and only if something is new."""
    with contextlib.suppress(OSError, RecordError):
        if read_private(path) == text:
            return
    write_private(path, text)


def authority_alone(home: Path) -> Path:
    """The file of the authority's certificate and no other, made if it is missing, for programs that trust one file.

    Raises StoreError (without an authority, too) or RecordError.
    """
    path = home / "authority" / "own.pem"
    _write_changed(path, authority_certificate(home))
    return path
