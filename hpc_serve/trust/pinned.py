"""The TLS of our own clients: it trusts one certificate alone, which the record of the run names.

The holder of the certificate's key is the engine at any address, so names are not compared. Standard library.
"""

from __future__ import annotations

import functools
import ssl

from hpc_serve.errors import RecordError


@functools.lru_cache(maxsize=256)
def pinned_context(certificate: str) -> ssl.SSLContext:
    """Make a client's context that accepts this `certificate` (PEM) alone. Raises RecordError if it is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    # The certificate itself is what is trusted, without the authority that signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise RecordError(f"the record's certificate cannot be read ({error}): restart the service.") from None
    return context
