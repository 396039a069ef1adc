"""A head's end of the control connection that listens, and a node that connects to it."""

from __future__ import annotations

import asyncio
import contextlib

from hpc_serve.job.links.control import ControlServer, connect
from hpc_serve.job.links.link import Link
from hpc_serve.job.machine.network import choose_port, listen_on


class Head:
    """A head's end that listens. `errors` are what the event loop was told of."""

    def __init__(self, token: str, silence_s: float) -> None:
        self.port, self.links, self.errors = choose_port(), asyncio.Queue[Link](), list[dict]()
        self.server = ControlServer(token, "n1", self.links.put_nowait, silence_s=silence_s)

    async def link(self) -> Link:
        """The next link of a node that has come in."""
        return await asyncio.wait_for(self.links.get(), 60)

    def has_nobody(self) -> bool:
        return self.links.empty() and not self.errors and not self.server._handshakes


@contextlib.asynccontextmanager
async def listening(token: str = "secret", silence_s: float = 60.0):
    head = Head(token, silence_s)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: head.errors.append(context))
    await head.server.start(listen_on(head.port))
    try:
        yield head
    finally:
        head.server.close()


async def join(port: int, token: str = "secret", deadline_s: float = 60) -> Link:
    """The link of node n2."""
    return await connect(
        ("127.0.0.1", port), token, rank=1, name="n2", own_address=lambda: "10.0.0.2", deadline_s=deadline_s
    )


@contextlib.asynccontextmanager
async def connected(**options):
    """The head's link and the node's, over a real connection."""
    async with listening(**options) as head:
        node = await join(head.port)
        yield await head.link(), node
