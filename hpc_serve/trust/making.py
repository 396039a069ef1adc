"""The steps of making a certificate with the `cryptography` package. Others import this module when they make one.

`authority` decides what a certificate says, who signs it, and where it lies. The import raises InvalidRequestError
where there is no `cryptography`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from hpc_serve.errors import InvalidRequestError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID
except ImportError as error:
    raise InvalidRequestError(
        f"TLS needs the Python package `cryptography` in the job's environment ({error}): install it there."
    ) from error

# Longer than a job runs; some TLS libraries refuse certificates of more than 825 days.
RUN_LIFETIME = timedelta(days=730)
# Clocks of nodes and clients differ.
_BACKDATED = timedelta(days=1)
_KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)

Names = list[x509.GeneralName]


def new_authority(name: str, *, lifetime: timedelta, signs_for: str | None = None) -> str:
    """Return a key and a certificate that signs for it, in one PEM text; of names only for `signs_for`, if given."""
    key = _new_key()
    made = (
        _builder(name, name, key, ends_at=now() + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign"), critical=True)
    )
    if signs_for is not None:
        limits = x509.NameConstraints(permitted_subtrees=[x509.DNSName(signs_for)], excluded_subtrees=None)
        made = made.add_extension(limits, critical=True)
    return _pem(key) + _sign(made, key)


def issue(authority: str, name: str, names: Names, *, is_for_clients: bool = False) -> tuple[str, str]:
    """Return a new key and the certificate of a server with these `names`, both as PEM.

    With `is_for_clients`, it is also that of a client. `authority` is what `new_authority` has made. The certificate
    ends after RUN_LIFETIME, or with its authority. Raises ValueError for an authority that cannot sign.
    """
    signer, signed_by = _read_authority(authority)
    if (end := signed_by.not_valid_after_utc) <= now():
        raise ValueError(f"its certificate expired on {end:%Y-%m-%d}")
    key, issuer = _new_key(), str(next(iter(signed_by.subject)).value)
    return _pem(key), _certificate(name, key, names, issuer, signer, ends_at=end, is_for_clients=is_for_clients)


def self_signed(name: str, names: Names) -> str:
    """Return a key and a server's certificate that it has signed itself, in one PEM text."""
    key = _new_key()
    return _pem(key) + _certificate(name, key, names, name, key)


def _read_authority(text: str) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
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


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    names: Names,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    ends_at: datetime | None = None,
    is_for_clients: bool = False,
) -> str:
    latest = now() + RUN_LIFETIME
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if is_for_clients else [])]
    made = (
        _builder(name, issuer, key, ends_at=min(latest, ends_at or latest))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return _sign(made, signer)


def names_and_end(certificate: str) -> tuple[x509.SubjectAlternativeName, datetime]:
    """Return the names of a certificate (PEM), and when it ends. Raises ValueError."""
    read = x509.load_pem_x509_certificate(certificate.encode())
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise ValueError(str(error)) from error
    return names, read.not_valid_after_utc


def names(hosts: Iterable[str], addresses: Iterable[str]) -> Names:
    """Return host names and IP addresses as names of a certificate, each once."""
    known = dict.fromkeys(map(ipaddress.ip_address, addresses))
    return [*map(x509.DNSName, dict.fromkeys(hosts)), *map(x509.IPAddress, known)]


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, *, ends_at: datetime) -> x509.CertificateBuilder:
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


def _key_usage(granted: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use == granted for use in _KEY_USES})


def _sign(builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey) -> str:
    return builder.sign(signer, SHA256()).public_bytes(Encoding.PEM).decode()


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def now() -> datetime:
    return datetime.now(timezone.utc)
