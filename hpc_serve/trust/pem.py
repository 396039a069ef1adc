"""The certificates in PEM text. What they are worth is not decided here."""

from __future__ import annotations

import contextlib
import re
import ssl

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def certificates_of(text: str) -> tuple[str, ...]:
    """The certificates in `text`, each as PEM with 64 characters a line; a block that is no base64 is left out."""
    found = []
    for match in _CERTIFICATE.finditer(text):
        with contextlib.suppress(ValueError):
            found.append(ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(match[0])))
    return tuple(dict.fromkeys(found))
