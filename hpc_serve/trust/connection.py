"""A connection to an engine, verified before anything else is sent: neither the key nor a prompt reaches a stranger.

Every new connection is verified, whatever answered at its address before: the engine shows the certificate that its
record names. The holder of the certificate's key is the engine at any address, so names are not compared. Standard
library alone.
"""

from __future__ import annotations

import functools
import http.client
import ssl
from dataclasses import dataclass, field

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.record import EndpointRecord

_WRONG_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


class NotOurEngineError(ConnectionError):
    """The program that answers at the address is not the engine of the record. It was sent nothing secret."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The `certificate` (PEM) by which an engine proves that it is a record's engine, and the service's key."""

    certificate: str
    api_key: str = field(repr=False)

    @classmethod
    def of(cls, record: EndpointRecord, api_key: str) -> Identity:
        return cls(certificate=record.certificate, api_key=api_key)


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


class VerifiedConnection(http.client.HTTPConnection):
    """An HTTP connection to the engine of `identity`; connecting raises NotOurEngineError if it is another program.

    It ignores proxy variables, as all of `http.client` does.
    """

    def __init__(self, host: str, port: int, identity: Identity, *, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._identity = identity

    def connect(self) -> None:
        """Connect, and have the other end show that it is the engine of `identity`.

        Raises NotOurEngineError, RecordError if the record names no certificate, or another OSError if no answer comes
        in time or the connection breaks.
        """
        super().connect()
        try:
            self.sock = pinned_context(self._identity.certificate).wrap_socket(self.sock)
        except BaseException as error:
            self.close()
            # An engine that ends breaks the handshake off, too.
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise NotOurEngineError(tls_refusal(error)) from error
            raise

    def ask(self, method: str, path: str, content: str | None = None) -> http.client.HTTPResponse:
        """Send a request with the service's key, and JSON if any; return the answer, whose body was not read."""
        headers = {"Authorization": f"Bearer {self._identity.api_key}", "Content-Type": "application/json"}
        self.request(method, path, content, headers)
        return self.getresponse()


def tls_refusal(error: ssl.SSLError) -> str:
    """Why a handshake failed, for a person."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_TIME:
            return f"by this host's clock its certificate does not hold ({error.verify_message}): compare the clocks"
        return f"the server does not show the certificate of the record ({error.verify_message})"
    return f"the server does not speak TLS as the engine of the record does ({error.reason or error})"
