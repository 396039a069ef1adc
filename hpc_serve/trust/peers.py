"""The certificates by which the processes of one run's Ray know each other.

A run has an authority of its own, in its private folder and gone with it, so that no certificate of another run is
accepted. Each launcher signs one certificate for its node. Where they are used is decided in `job/run/ray_cluster`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.files import create_private, make_private_folder, read_private, write_private
from hpc_serve.trust import making
from hpc_serve.trust.pem import certificates_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_AUTHORITY = "ray_authority.pem"
_NAME = "hpc-serve run"
_AUTHORITY_NAME = f"{_NAME} authority"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class PeerFiles:
    """The 0600 files that a process of the run reads: what it trusts, what it shows, and the key to that."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> PeerFiles:
        """Where `make_peer_files` puts them."""
        return cls(authority=folder / "authority.pem", certificate=folder / "node.pem", key=folder / "node.key")


def make_peer_files(run_dir: Path, folder: Path, *, addresses: Iterable[str]) -> PeerFiles:
    """A key and a certificate for this node at `addresses` (and the loopback address), in its private `folder`.

    The run's authority is made in `run_dir` if it is missing; two nodes at once end with one. Raises StoreError,
    RecordError, or InvalidRequestError without `cryptography`.
    """
    making.require_cryptography()
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signer, authority = _authority(run_dir)
    key = making.new_key()
    known = dict.fromkeys(ipaddress.ip_address(address) for address in (*addresses, _LOOPBACK))
    builder = (
        making.builder(_NAME, key, ends_at=making.now() + making.RUN_LIFETIME)
        .issuer_name(making.common_name(_AUTHORITY_NAME))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(address) for address in known]), critical=False)
    )
    make_private_folder(folder)
    files = PeerFiles.in_folder(folder)
    write_private(files.authority, authority)
    write_private(files.certificate, making.sign(builder, signer))
    write_private(files.key, making.private_pem(key))
    return files


def _authority(run_dir: Path) -> tuple[EllipticCurvePrivateKey, str]:
    """The key and the certificate (PEM) of the run's authority, made if it is missing.

    It may sign for anybody, since only this run trusts it.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = run_dir / _AUTHORITY
    if not path.exists():
        create_private(path, making.new_authority(_AUTHORITY_NAME, lifetime=making.RUN_LIFETIME))
    text = read_private(path, secret=True)
    try:
        key = load_pem_private_key(text.encode(), password=None)
        (certificate,) = certificates_of(text)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path} does not hold the authority of this run: start the job again.") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key, certificate
