"""Runs a gateway until it is told to end: uvicorn on one listener, with our limits on strangers' connections.

At SIGTERM or SIGINT it takes no new requests, finishes those under way within a bound, and returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.gateway.listening import ListenAddress
from hpc_serve.gateway.settings import Settings
from hpc_serve.rendezvous.store import ServiceStore

try:
    import uvicorn

    from hpc_serve.gateway.app import make_app
except ImportError as error:
    raise InvalidRequestError(
        f"the gateway needs packages that are not here ({error}): pip install 'hpc-serve[gateway]', or use the"
        " environment of vLLM, which has them."
    ) from error

from hpc_serve.gate import connection_limits

KEEP_ALIVE_S = 65


class Server(uvicorn.Server):
    """uvicorn, which after a signal would end this process by that signal."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        super().handle_exit(sig, frame)
        self._captured_signals.clear()


def serve(
    place: ListenAddress,
    store: ServiceStore,
    settings: Settings,
    *,
    certificate: Path | None,
    grace_s: float,
    on_start: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, by TLS where there is a file with a key and its `certificate`.

    `on_start` is called when requests are answered. Raises HpcServeError.
    """
    connection_limits.install()
    if certificate is not None:
        settings = replace(settings, hosts=None)  # a foreign name is not in the certificate
    config = uvicorn.Config(
        _announced(make_app(store, settings), on_start),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(grace_s),
        ssl_certfile=certificate,  # uvicorn reads the key from it, too
    )
    Server(config).run(sockets=[place.listener])


def _announced(app: Any, on_start: Callable[[], None]) -> Any:
    async def announced(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            connection_limits.bound_tls_handshakes(asyncio.get_running_loop())
            asyncio.get_running_loop().call_soon(on_start)
        await app(scope, receive, send)

    return announced
