"""The steps of making a certificate with the `cryptography` package, which is imported only when one is made.

`authority` (endpoints) and `peers` (Ray) decide what a certificate says, who signs it, and where it lies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, NameConstraints

# Longer than a job runs; some TLS libraries refuse certificates of more than 825 days.
RUN_LIFETIME = timedelta(days=730)
# Clocks of nodes and clients differ.
_BACKDATED = timedelta(days=1)


def require_cryptography() -> None:
    try:
        import cryptography.x509  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(
            f"TLS needs the Python package `cryptography` in the job's environment ({error}): install it there."
        ) from error


def new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def new_authority(name: str, *, lifetime: timedelta, constraints: NameConstraints | None = None) -> str:
    """Return a key and a certificate that signs for it, in one PEM text; `constraints` limit its signatures."""
    from cryptography import x509

    key = new_key()
    made = (
        _builder(name, name, key, ends_at=now() + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
    )
    if constraints is not None:
        made = made.add_extension(constraints, critical=True)
    return private_pem(key) + _sign(made, key)


def read_authority(text: str) -> tuple[EllipticCurvePrivateKey, Certificate]:
    """Return the key and the certificate that `new_authority` has made. Raises ValueError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    neither = "the file does not hold a key and the certificate of an authority"
    try:
        key = load_pem_private_key(text.encode(), password=None)
        certificate = x509.load_pem_x509_certificate(text.encode())
        can_sign = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise ValueError(neither) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not can_sign:
        raise ValueError(neither)
    if key.public_key() != certificate.public_key():
        raise ValueError("its key is not that of its certificate")
    return key, certificate


def new_certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    names: Iterable[GeneralName],
    *,
    issuer: str,
    signer: EllipticCurvePrivateKey,
    ends_at: datetime | None = None,
    is_for_clients: bool = False,
) -> str:
    """Return the certificate (PEM) of a server with these `names`; with `is_for_clients`, also of a client.

    `signer` is the key of the `issuer`. The certificate ends after RUN_LIFETIME at the latest.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    latest = now() + RUN_LIFETIME
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if is_for_clients else [])]
    made = (
        _builder(name, issuer, key, ends_at=min(latest, ends_at or latest))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return _sign(made, signer)


def name_of(certificate: Certificate) -> str:
    """Return the common name of a certificate."""
    return str(next(iter(certificate.subject)).value)


def ip_names(addresses: Iterable[str]) -> list[GeneralName]:
    """Return the addresses as names of a certificate, each once."""
    from cryptography import x509

    return [x509.IPAddress(known) for known in dict.fromkeys(map(ipaddress.ip_address, addresses))]


def _builder(name: str, issuer: str, key: EllipticCurvePrivateKey, *, ends_at: datetime) -> CertificateBuilder:
    from cryptography import x509

    def common_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .issuer_name(common_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _BACKDATED)
        .not_valid_after(ends_at)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(builder: CertificateBuilder, signer: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(signer, SHA256()).public_bytes(Encoding.PEM).decode()


def private_pem(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def now() -> datetime:
    return datetime.now(timezone.utc)
