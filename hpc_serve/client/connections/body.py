"""The body of an answer, as the HTTP library and the gateway read it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.sdk import http


class Body(http.SyncByteStream, http.AsyncByteStream):
    """An answer's body, for threads and event loops. A kind of body has `read` and `aclose`."""

    async def read(self) -> bytes | None:
        """Return what has come since the last read, once something has; None at the end."""
        raise NotImplementedError

    async def read_all(self) -> bytes:
        """Return all that comes, and close."""
        try:
            return b"".join([piece async for piece in self])
        finally:
            await self.aclose()

    # No generators: the SDK leaves one suspended at `[DONE]`, and the event loop makes a task to end each of them.
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if (piece := await self.read()) is None:
            raise StopAsyncIteration
        return piece

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if (piece := run_blocking(self.read())) is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        run_blocking(self.aclose())
