"""Ports in the clear before engines that speak TLS, for programs that cannot be given a run's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.trust.connection import pinned_context


class PlainPorts:
    """One port on 127.0.0.1 for the engine of each record, in their order: `ports`.

    A connection that the engine refuses or breaks is closed on this side too.
    """

    def __init__(self, records: Sequence[EndpointRecord]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.ports = [
            asyncio.run_coroutine_threadsafe(self._listen(record), self._loop).result(60) for record in records
        ]

    async def _listen(self, record: EndpointRecord) -> int:
        context = pinned_context(record.certificate)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                engine = await asyncio.open_connection(record.hosts[0], record.port, ssl=context)
                await asyncio.gather(_copy(reader, engine[1]), _copy(engine[0], writer))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
