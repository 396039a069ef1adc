"""Ray on one node, in two steps: its program is imported at once, and is told the rest later.

The imports run while launchers find each other and check their nodes, so they do not lengthen the start. The launcher's
role decides what Ray is told. The child's own program is `ray_start`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_serve.job.machine.log_setup import print_line
from hpc_serve.job.machine.process import Child
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts, StopOrder
from hpc_serve.job.run.ray_cluster import ray_environ


class HeldRay:
    """A part of the run that is called `name`. It ends the run by its end from `release` on."""

    def __init__(self, name: str, parts: Parts, *, grace_s: float, on_line: Callable[[str], None] = print_line) -> None:
        self._name, self._parts, self._grace_s, self._on_line = name, parts, grace_s, on_line
        self._child: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def hold(self, node: Node) -> None:
        """Start the child, which imports and waits, and make the certificate that Ray shows.

        Raises what `trust.peers` does.
        """
        from hpc_serve.trust.peers import make_peer_files

        child = await self._parts.start_child(
            self._name,
            [sys.executable, "-u", "-m", "hpc_serve.job.ray.ray_start"],
            ray_environ(node),
            on_line=self._on_line,
            told=True,
        )
        self._parts.add_child(StopOrder.RAY, child, grace_s=self._grace_s)
        run_dir = Path(node.environ["HPC_SERVE_JOB_DIR"])
        await asyncio.to_thread(make_peer_files, run_dir, node.node_dir / "tls", addresses=(node.internal_address,))
        self._child.set_result(child)

    async def release(self, argv: Sequence[str], environ: Mapping[str, str], *, watch: Sequence[str] = ()) -> None:
        """Have it become `argv` with exactly `environ`, once it is held. `watch` are words for `ray_nodes`.

        Raises PartFailedError if there is no such command.
        """
        child = await self._child
        self._parts.require_command(self._name, argv[0], environ)
        order = {"argv": list(argv), "environ": dict(environ), "watch": list(watch)}
        child.tell(json.dumps(order), is_last=not watch)
        self._parts.end_with(child)
