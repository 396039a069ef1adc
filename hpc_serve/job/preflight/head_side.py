"""The head's part of the preflight: it asks all nodes for their facts, has them reach each other, and judges.

`head` decides what follows from the verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.job.links.link import Link
from hpc_serve.job.preflight.facts import NodeFacts, NodeReport
from hpc_serve.job.preflight.judge import judge
from hpc_serve.job.preflight.node_side import GPUS_S, REACH_S, NodePreflight, needs_of
from hpc_serve.job.preflight.peers import Peer, PeerListener, find_unreached
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.files import write_json
from hpc_serve.rendezvous.preflight import PreflightReport, preflight_file
from hpc_serve.rendezvous.store import ServiceStore

_log = logging.getLogger(__name__)
_SPARE_S = 15.0


class HeadPreflight:
    """The preflight of a run, from the moment it is made."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._began_at = time.time()
        self._own = NodePreflight(node, node.head)
        self._asked: dict[Link, asyncio.Task[NodeReport]] = {}
        self._peers: dict[Link, Peer] = {}

    def ask(self, link: Link) -> None:
        """Ask a node that has joined for its facts."""
        self._asked[link] = asyncio.create_task(self._ask_facts(link))

    async def _ask_facts(self, link: Link) -> NodeReport:
        message = await link.ask("preflight")
        try:
            facts = from_json_text(NodeFacts, str(message["facts"]), source="its facts")
            self._peers[link] = Peer(name=link.name, address=facts.address, port=int(message["port"]))
            return NodeReport(name=link.name, facts=facts, clock_ahead_s=float(message["now"]) - time.time())
        except (KeyError, TypeError, ValueError, RecordError) as error:
            _log.warning("what node %s says of itself cannot be read: %s", link.name, error)
            return NodeReport(name=link.name, facts=None)

    async def report(self) -> PreflightReport:
        """Return the verdicts over all nodes that have joined. It never fails: what is not known is not checked."""
        began_at = time.monotonic()
        own = await self._own.facts()
        links = sorted(self._asked, key=lambda link: link.rank)
        await _wait(self._asked.values(), GPUS_S + _SPARE_S)
        unreached = await self._reach() if links else {}
        reports = [NodeReport(name=self._node.allocation.node_name, facts=own, unreached=unreached.get(None))]
        for link in links:
            task = self._asked[link]
            known = task.result() if task.done() else NodeReport(name=link.name, facts=None)
            reports.append(replace(known, unreached=unreached.get(link)))
        return PreflightReport(
            verdicts=judge(reports, needs_of(self._node)),
            num_nodes=len(reports),
            took_s=time.monotonic() - began_at,
            began_at=self._began_at,
        )

    async def _reach(self) -> dict[Link | None, Mapping[str, str]]:
        """Have all nodes try all others; returns whom each does not reach. None stands for the head."""
        try:
            listener = PeerListener(self._node.allocation.node_name, self._node.head, self._node.token)
        except OSError:  # the head's address is not one of this node's own, as behind a translation
            return {}
        found: dict[Link | None, Mapping[str, str]] = {}

        async def ask(link: Link) -> None:
            others = [listener.peer, *(peer for other, peer in self._peers.items() if other is not link)]
            message = await link.ask("peers", peers=[[it.name, it.address, it.port] for it in others])
            if isinstance(nodes := message.get("nodes"), dict):
                found[link] = {str(name)[:256]: str(error)[:256] for name, error in nodes.items()}

        try:
            asked = [asyncio.create_task(ask(link)) for link in self._peers]
            found[None] = await find_unreached([*self._peers.values()], self._node.token, within_s=REACH_S)
            await _wait(asked, REACH_S + _SPARE_S)
        finally:
            await asyncio.to_thread(listener.close)
        return found


async def _wait(tasks: Collection[asyncio.Task[Any]], within_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=within_s)


def log_report(report: PreflightReport) -> None:
    """Log the summary, and each verdict that a person should read."""
    _log.info("%s", report.summary)
    for verdict in (*report.of_level("warning"), *report.of_level("failed")):
        _log.log(logging.ERROR if verdict.level == "failed" else logging.WARNING, "%s", verdict.sentence)


def write_report(node: Node, store: ServiceStore, report: PreflightReport) -> None:
    """Write the report beside the record. A failure is logged: a service goes on when its home is full."""
    allocation = node.allocation
    job_id, restart, replica = allocation.job_id, allocation.restart, allocation.share.index
    path = preflight_file(store, node.options.service, job_id=job_id, restart=restart, replica=replica)
    try:
        write_json(path, report)
    except StoreError as error:
        _log.warning("the preflight's report cannot be written: %s", error)
