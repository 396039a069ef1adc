"""The gate as the engine loads it: `vllm serve --middleware hpc_serve.gate.engine_gate.Gate`.

vLLM imports a middleware before it makes its uvicorn server. Importing this module therefore puts the limits for
connections in force, and has the server take the launcher's socket; it is imported in the engine's process alone.
`gate` decides which requests are admitted.
"""

from __future__ import annotations

import asyncio

from hpc_serve.gate import connection_limits, gate, launchers_socket

connection_limits.install()
launchers_socket.serve_on_launchers_socket()


class Gate(gate.Gate):
    """The gate, which answers nothing on a connection that has no limits."""

    async def __call__(self, scope: gate.Scope, receive: gate.Receive, send: connection_limits.Send) -> None:
        if scope["type"] == "lifespan":  # uvicorn sends it before it listens
            connection_limits.bound_tls_handshakes(asyncio.get_running_loop())
        elif scope["type"] == "http" and connection_limits.HAS_KEY not in scope:
            raise connection_limits.LimitsNotInForceError(
                "hpc-serve's limits for connections are not in force: this uvicorn uses another protocol class. "
                "No request is answered; install the uvicorn of envs/."
            )
        await super().__call__(scope, receive, send)
