"""The server of a node other than the head, where each node has one (`--data-parallel-hybrid-lb`).

It has its own record, so that clients choose among the servers. Its ranks share experts with those of the other nodes.
So the head decides when it drains and how it ends, and its own end ends the run (`worker`).
"""

from __future__ import annotations

from collections.abc import Mapping

from hpc_serve.job.engine.drain import drain_engine
from hpc_serve.job.engine.endpoint import make_endpoint
from hpc_serve.job.engine.engine import Engine
from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.outcome import Outcome
from hpc_serve.job.run.parts import Parts
from hpc_serve.job.run.record_keeper import RecordKeeper, end_of, first_record
from hpc_serve.rendezvous.store import ServiceStore, default_home


class WorkerServer:
    """This node's server. To make it publishes its record. Raises what `make_endpoint` does."""

    def __init__(self, node: Node, address: str, parts: Parts) -> None:
        self._node, self._parts = node, parts
        store = ServiceStore(default_home(node.environ))
        endpoint = make_endpoint(node, first_record(node, address), store)
        self._keeper = RecordKeeper(store, endpoint.record)
        self._engine = Engine(node, self._keeper, endpoint, parts, read_by_workers=ReadSoFar, on_ready=_go_on)

    async def serve(self, environ: Mapping[str, str]) -> None:
        """Serve until cancelled. Raises PartFailedError."""
        self._parts.run_in_background(self._keeper.renew())
        await self._engine.serve(environ)

    async def drain(self, stop: Outcome) -> None:
        """Finish the requests under way."""
        await drain_engine(self._engine, self._node, self._keeper, self._parts.run_end, stop)

    def publish_end(self, outcome: Outcome) -> None:
        """Say in the record how the run ends."""
        if outcome.is_failure:
            self._keeper.update(progress=None, **end_of(outcome, self._node.environ))
        else:
            self._keeper.update(state="draining", stage="stopping", progress=None, reason=outcome.reason)

    async def finish(self) -> None:
        """Write the last record, once nothing runs here any more."""
        if self._keeper.record.state == "draining":
            self._keeper.update(state="stopped", stage="stopped", progress=None, exit_code=0)
        await self._keeper.finish()


async def _go_on() -> None:
    """Do nothing: the head tells all nodes that the engine is ready."""
