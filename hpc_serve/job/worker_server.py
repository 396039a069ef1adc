"""The server of a node other than the head, where each node has one (`--data-parallel-hybrid-lb`).

It has its own record, so that clients choose among the servers. Its ranks share experts with those of the other nodes.
So the head decides when it drains and how it ends, and its own end ends the run (`worker`).
"""

from __future__ import annotations

from hpc_serve.job.engine.endpoint import make_endpoint
from hpc_serve.job.engine.engine import Engine
from hpc_serve.job.run.node import Node
from hpc_serve.job.run.parts import Parts
from hpc_serve.job.run.record_keeper import RecordKeeper, first_record
from hpc_serve.rendezvous.store import ServiceStore, default_home


def make_server(node: Node, parts: Parts) -> Engine:
    """Publish this node's record, and return its engine, which is not started yet. Raises what `make_endpoint` does."""
    store = ServiceStore(default_home(node.environ))
    endpoint, record = make_endpoint(node, first_record(node), store)
    keeper = RecordKeeper(store, record)
    parts.run_in_background(keeper.renew())
    return Engine(node, keeper, endpoint, parts)
