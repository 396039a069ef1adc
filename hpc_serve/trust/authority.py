"""The certificates of a home: its private authority, and one certificate for the endpoint of each run.

The authority's file holds its key and its certificate, 0600. Making certificates needs the `cryptography` package, and
only a job's head imports it. A program that trusts them needs the standard library alone (`pinned`, `bundle`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private, write_private
from hpc_serve.trust.pem import certificates_of

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

    Raises StoreError, RecordError (the file there is not usable), or InvalidRequestError without `cryptography`.
    """
    path = authority_file(home)
    make_private_folder(home, tighten=False)
    make_private_folder(path.parent)
    if not path.exists():
        create_private(path, _new_authority())
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


def _new_authority() -> str:
    """Return a key and a certificate that signs for it, in one text.

    It may sign for IP addresses and localhost, not for other names: a program that trusts it still asks others than
    its holder who a web site is. A name of localhost alone says so: constraints bind the kinds of names that they
    list. One that lists all addresses as well is refused by BoringSSL ("unsupported name constraint type").
    """
    from hpc_serve.trust import making

    # Names of their own: two authorities of one name confuse whoever looks for an issuer by its name.
    name = f"hpc-serve authority {secrets.token_hex(4)}"
    return making.new_authority(name, lifetime=_AUTHORITY_LIFETIME, signs_for=_LOCAL_NAME)


def _unusable(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} cannot sign certificates: {why}. Remove it to have a new one made by the next job, and run "
        "`hpc-serve env` again where other tools than Python's client talk to a service."
    )
