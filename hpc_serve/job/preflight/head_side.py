"""The head's part of the preflight: it asks all nodes for their facts, has them reach each other, and judges.

`head` decides what follows from the verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.job.links.link import Link
from hpc_serve.job.preflight.facts import NodeFacts
from hpc_serve.job.preflight.judge import judge
from hpc_serve.job.preflight.node_side import GPUS_S, REACH_S, NodePreflight, Peer, needs_of
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.store import PreflightReport, ServiceStore, preflight_file

_log = logging.getLogger(__name__)
_SPARE_S = 15.0

Asked = Link | NodePreflight
"""A node that is asked: another one, or the head itself."""


class HeadPreflight:
    """The preflight of a run, from the moment it is made. The head answers its questions as the other nodes do."""

    def __init__(self, node: Node) -> None:
        self._began_at = time.time()
        self._needs = needs_of(node)
        self._own = NodePreflight(node)
        self._asked: dict[Asked, asyncio.Task[NodeFacts | None]] = {}
        self._peers: dict[Asked, Peer] = {}
        self.ask(self._own)

    def ask(self, asked: Asked) -> None:
        """Ask a node that has joined for its facts."""
        self._asked[asked] = asyncio.create_task(self._ask_facts(asked))

    async def _ask_facts(self, asked: Asked) -> NodeFacts | None:
        message = await asked.ask("preflight")
        try:
            facts = from_json_text(NodeFacts, str(message["facts"]), source="its facts")
            if port := int(message["port"]):
                self._peers[asked] = Peer(name=asked.name, address=facts.address, port=port)
            return replace(facts, clock_ahead_s=float(message["now"]) - time.time())
        except (KeyError, TypeError, ValueError, RecordError) as error:
            _log.warning("what node %s says of itself cannot be read: %s", asked.name, error)
            return None

    async def report(self) -> PreflightReport:
        """Return the verdicts over all nodes that have joined. It never fails: what is not known is not checked."""
        began_at = time.monotonic()
        await asyncio.wait(self._asked.values(), timeout=GPUS_S + _SPARE_S)
        unreached = await self._reach() if self._own in self._peers else {}
        nodes: dict[str, NodeFacts | None] = {}
        for asked in sorted(self._asked, key=lambda asked: asked.rank):
            task = self._asked[asked]
            facts = task.result() if task.done() else None
            nodes[asked.name] = facts and replace(facts, unreached=unreached.get(asked))
        return PreflightReport(
            verdicts=judge(nodes, self._needs),
            num_nodes=len(nodes),
            took_s=time.monotonic() - began_at,
            began_at=self._began_at,
        )

    async def _reach(self) -> dict[Asked, Mapping[str, str]]:
        """Have all nodes try all others; returns whom each does not reach."""
        found: dict[Asked, Mapping[str, str]] = {}

        async def ask(asked: Asked) -> None:
            others = [peer for other, peer in self._peers.items() if other is not asked]
            message = await asked.ask("peers", peers=[[it.name, it.address, it.port] for it in others])
            if isinstance(nodes := message.get("nodes"), dict):
                found[asked] = {str(name)[:256]: str(error)[:256] for name, error in nodes.items()}

        await asyncio.wait([asyncio.create_task(ask(one)) for one in self._peers], timeout=REACH_S + _SPARE_S)
        await asyncio.to_thread(self._own.close)
        return found


def log_report(report: PreflightReport) -> None:
    """Log the summary, and each verdict that a person should read."""
    _log.info("%s", report.summary)
    for verdict in (*report.of_level("warning"), *report.of_level("failed")):
        _log.log(logging.ERROR if verdict.level == "failed" else logging.WARNING, "%s", verdict.sentence)


def write_report(node: Node, store: ServiceStore, report: PreflightReport) -> None:
    """Write the report beside the record. A failure is logged: a service goes on when its home is full."""
    path = preflight_file(store, node.options.service, node.allocation.record_name)
    try:
        write_json(path, report)
    except StoreError as error:
        _log.warning("the preflight's report cannot be written: %s", error)
