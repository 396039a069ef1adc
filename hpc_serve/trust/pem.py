"""The certificates in PEM text. Pure; what they are worth is not decided here."""

from __future__ import annotations

import base64
import binascii
import re

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\s*([A-Za-z0-9+/=\s]+?)\s*-----END CERTIFICATE-----")


def certificates_of(text: str) -> tuple[str, ...]:
    """The certificates in `text`, each as PEM with 64 characters a line; a block that is no base64 is left out."""
    blocks = (_normalized(match[1]) for match in _CERTIFICATE.finditer(text))
    return tuple(dict.fromkeys(block for block in blocks if block is not None))


def _normalized(body: str) -> str | None:
    joined = "".join(body.split())
    try:
        base64.b64decode(joined, validate=True)
    except (binascii.Error, ValueError):
        return None
    lines = [joined[start : start + 64] for start in range(0, len(joined), 64)]
    return "\n".join(("-----BEGIN CERTIFICATE-----", *lines, "-----END CERTIFICATE-----", ""))
