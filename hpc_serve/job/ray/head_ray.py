"""Ray as the head's launcher sees it: its head here, from the first import on, and the nodes that it reports.

When each step is due, and what its failure means, is decided in `head`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hpc_serve.job.machine.log_setup import print_line
from hpc_serve.job.machine.network import hold_port
from hpc_serve.job.ray.held_ray import HeldRay
from hpc_serve.job.ray.ray_nodes import RayNodes, missing_nodes, parse_line
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts
from hpc_serve.job.run.ray_cluster import head_argv, ray_environ
from hpc_serve.job.run.record_keeper import RecordKeeper

_NAME = "ray head"
_GRACE_S = 4.0


class HeadRay(HeldRay):
    """Ray of one run."""

    def __init__(self, node: Node, parts: Parts, keeper: RecordKeeper) -> None:
        super().__init__(_NAME, parts, grace_s=_GRACE_S, on_line=self.read_line)
        self._node, self._keeper = node, keeper
        self.environ: dict[str, str] = {}
        """What Ray's processes on this node have, and an engine over it, but for RAY_ADDRESS; since `start_head`."""
        self._gcs_port: int | None = None
        self._nodes: RayNodes = {}

    async def start_head(self, node: Node) -> None:
        """Start Ray's head, if there is a command `ray`; `node` is this node as all nodes have agreed on."""
        self._node = node
        self.environ = ray_environ(node)
        if shutil.which("ray", path=self.environ.get("PATH")) is None:  # the preflight says so, with the cure
            return
        self._client_port = hold_port()
        argv = head_argv(node, client_port=self._client_port.getsockname()[1])
        watch = (node.ray_dir, node.internal_address, node.options.device)
        await self.release(argv, self.environ, watch=watch)

    async def engine_environ(self) -> dict[str, str]:
        """The environment of an engine over this Ray, once its head is a node of it; RAY_ADDRESS says where it is.

        Another node that joins before that finds no head, and Ray has it look again only after two seconds.
        Raises PartFailedError.
        """
        node = self._node
        self._parts.require_command(_NAME, "ray", self.environ)
        self._keeper.set_stage("starting Ray's head")

        def missing() -> str | None:
            if self._gcs_port is None:
                return "Ray's GCS does not listen"
            if node.internal_address not in self._nodes:
                return f"{node.allocation.node_name} ({node.internal_address}) has not joined the Ray that it started"
            return None

        await self._parts.wait_until_complete(missing, part=_NAME, within_s=node.options.join_s)
        return {**self.environ, "RAY_ADDRESS": f"{node.internal_address}:{self._gcs_port}"}

    async def wait_for_nodes(self, others: Mapping[str, str]) -> None:
        """Return once Ray has exactly this node and the `others` (names, by address), each with its devices."""
        node = self._node
        expected = {node.internal_address: node.allocation.node_name, **others}

        def missing() -> str | None:
            sentences = missing_nodes(self._nodes, expected, node.options.device, node.options.gpus_per_node)
            joined = set(expected) & set(self._nodes)
            self._keeper.set_stage("waiting for Ray nodes", len(joined), len(expected))
            return "; ".join(sentences) or None

        await self._parts.wait_until_complete(missing, part="ray nodes", within_s=node.options.join_s)
        self._child.result().tell()  # Ray's nodes are looked at no more

    def read_line(self, line: str) -> None:
        """Take a line of Ray's head: the port of its GCS, its nodes, or a line of its log."""
        if (told := parse_line(line)) is None:
            print_line(line)
        else:
            self._gcs_port, self._nodes = told
            self._parts.note_change()
