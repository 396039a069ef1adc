"""The head's part of the preflight: it asks all nodes for their facts, has them reach each other, and judges.

`head` decides what follows from the verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.job.links.link import Link, Message
from hpc_serve.job.preflight.facts import NodeFacts, NodeReport
from hpc_serve.job.preflight.judge import judge
from hpc_serve.job.preflight.node_side import GPUS_S, REACH_S, NodePreflight, needs_of, texts
from hpc_serve.job.preflight.peers import Peer, PeerListener, find_unreached
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.preflight import PreflightReport, preflight_file, write_preflight
from hpc_serve.rendezvous.store import ServiceStore

_log = logging.getLogger(__name__)
_SPARE_S = 15.0


class _Asked:
    """A node that was asked, and its answers as they come: its facts, then which nodes it cannot reach."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.peer: Peer | None = None
        self._clock_ahead_s = 0.0
        new_future = asyncio.get_running_loop().create_future
        self.facts: asyncio.Future[NodeFacts | None] = new_future()
        self.unreached: asyncio.Future[Mapping[str, str] | None] = new_future()

    def take(self, message: Message) -> None:
        """Take an answer. One that cannot be read counts as not given."""
        kind = message.get("kind")
        try:
            if kind == "facts" and not self.facts.done():
                self.facts.set_result(self._read_facts(message))
            elif kind == "unreached" and not self.unreached.done():
                self.unreached.set_result(texts(message["nodes"]))
        except (KeyError, TypeError, ValueError, RecordError) as error:
            _log.warning("what node %s says of itself cannot be read: %s", self.link.name, error)
            (self.facts if kind == "facts" else self.unreached).set_result(None)

    def _read_facts(self, message: Message) -> NodeFacts:
        facts = from_json_text(NodeFacts, str(message["facts"]), source="its facts")
        self.peer = Peer(name=self.link.name, address=facts.address, port=int(message["port"]))
        self._clock_ahead_s = float(message["now"]) - time.time()
        return facts

    @property
    def report(self) -> NodeReport:
        """Return the facts that are known of the node by now."""
        return NodeReport(
            name=self.link.name,
            facts=self.facts.result() if self.facts.done() else None,
            clock_ahead_s=self._clock_ahead_s,
            unreached=self.unreached.result() if self.unreached.done() else None,
        )


class HeadPreflight:
    """The preflight of a run, from the moment it is made. `run_in_background` runs what is sent to the nodes."""

    def __init__(self, node: Node, run_in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._node, self._run_in_background = node, run_in_background
        self._began_at = time.time()
        self._own = NodePreflight(node)
        self._asked: dict[int, _Asked] = {}

    def ask(self, link: Link) -> None:
        """Ask a node that has joined for its facts."""
        self._asked[link.rank] = _Asked(link)
        self._run_in_background(link.send("preflight"))

    def take(self, link: Link, message: Message) -> None:
        """Take an answer of a node."""
        if link.rank in self._asked:
            self._asked[link.rank].take(message)

    async def report(self) -> PreflightReport:
        """Return the verdicts over all nodes that have joined. It never fails: what is not known is not checked."""
        began_at = time.monotonic()
        own = await self._own.facts(self._node.head)
        asked = [self._asked[rank] for rank in sorted(self._asked)]
        await _wait([one.facts for one in asked], GPUS_S + _SPARE_S)
        own_unreached = await self._reach(asked) if asked else None
        of_head = NodeReport(name=self._node.allocation.node_name, facts=own, unreached=own_unreached)
        reports = [of_head, *(one.report for one in asked)]
        return PreflightReport(
            verdicts=judge(reports, needs_of(self._node)),
            num_nodes=len(reports),
            took_s=time.monotonic() - began_at,
            began_at=self._began_at,
        )

    async def _reach(self, asked: list[_Asked]) -> dict[str, str] | None:
        """Have all nodes try all others; returns which the head does not reach."""
        peers = [one.peer for one in asked if one.peer is not None]
        try:
            listener = PeerListener(self._node.allocation.node_name, self._node.head, self._node.token)
        except OSError:  # the head's address is not one of this node's own, as behind a translation
            return None
        try:
            everybody = [listener.peer, *peers]
            for one in asked:
                others = [[it.name, it.address, it.port] for it in everybody if it is not one.peer]
                await one.link.send("peers", peers=others)
            unreached = await find_unreached(peers, self._node.token, within_s=REACH_S)
            await _wait([one.unreached for one in asked if one.peer], REACH_S + _SPARE_S)
        finally:
            await asyncio.to_thread(listener.close)
        return unreached


async def _wait(answers: Sequence[asyncio.Future[Any]], within_s: float) -> None:
    if answers:
        await asyncio.wait(answers, timeout=within_s)


def log_report(report: PreflightReport) -> None:
    """Log the summary, and each verdict that a person should read."""
    _log.info("%s", report.summary)
    for verdict in report.of_level("warning"):
        _log.warning("%s", verdict.sentence)
    for verdict in report.of_level("failed"):
        _log.error("%s", verdict.sentence)


def write_report(node: Node, store: ServiceStore, report: PreflightReport) -> None:
    """Write the report beside the record. A failure is logged: a service goes on when its home is full."""
    allocation = node.allocation
    job_id, restart, replica = allocation.job_id, allocation.restart, allocation.share.index
    path = preflight_file(store, node.options.service, job_id=job_id, restart=restart, replica=replica)
    try:
        write_preflight(path, report)
    except StoreError as error:
        _log.warning("the preflight's report cannot be written: %s", error)
