"""The steps of making a certificate with the `cryptography` package, which is imported only when one is made.

What a certificate says, who signs it and where it lies is decided by `authority` (endpoints) and `peers` (Ray).
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import CertificateBuilder, KeyUsage, Name, NameConstraints

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


def builder(name: str, key: EllipticCurvePrivateKey, *, ends_at: datetime) -> CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _BACKDATED)
        .not_valid_after(ends_at)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def common_name(text: str) -> Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> KeyUsage:
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


def new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def new_authority(name: str, *, lifetime: timedelta, constraints: NameConstraints | None = None) -> str:
    """A key and a certificate that signs for it, in one PEM text; `constraints` limit whom it may sign for."""
    from cryptography import x509

    key = new_key()
    made = (
        builder(name, key, ends_at=now() + lifetime)
        .issuer_name(common_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(key_cert_sign=True), critical=True)
    )
    if constraints is not None:
        made = made.add_extension(constraints, critical=True)
    return private_pem(key) + sign(made, key)


def sign(builder: CertificateBuilder, signer: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(signer, SHA256()).public_bytes(Encoding.PEM).decode()


def private_pem(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def now() -> datetime:
    return datetime.now(timezone.utc)
