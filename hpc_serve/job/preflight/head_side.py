"""The head's part of the preflight: it asks all nodes for their facts, has them reach each other, and judges.

What follows from the verdicts is decided by `head`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.job.links.link import Link, Message
from hpc_serve.job.preflight.facts import ClockReading, NodeFacts, NodeReport
from hpc_serve.job.preflight.judge import judge
from hpc_serve.job.preflight.node_side import GPUS_S, REACH_S, NodePreflight, needs_of, texts
from hpc_serve.job.preflight.peers import Peer, PeerListener, find_unreached
from hpc_serve.job.run.node import Node
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.preflight import PreflightReport, preflight_file, write_preflight
from hpc_serve.rendezvous.store import ServiceStore

_log = logging.getLogger(__name__)
_SPARE_S = 15.0


@dataclass(kw_only=True)
class _Answers:
    """What one node has said so far."""

    link: Link
    asked_at: float
    clock: ClockReading | None = None
    facts: NodeFacts | None = None
    peer: Peer | None = None
    unreached: dict[str, str] | None = None
    has_facts: asyncio.Event = field(default_factory=asyncio.Event)
    has_tried: asyncio.Event = field(default_factory=asyncio.Event)


class HeadPreflight:
    """The preflight of a run, from the moment it is made. `run_in_background` runs what is sent to the nodes."""

    def __init__(self, node: Node, run_in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._node, self._run_in_background = node, run_in_background
        self._began_at = time.time()
        self._own = NodePreflight(node)
        self._answers: dict[int, _Answers] = {}

    def ask(self, link: Link) -> None:
        """Ask a node that has joined for its facts."""
        self._answers[link.rank] = _Answers(link=link, asked_at=time.time())
        self._run_in_background(link.send("preflight"))

    def take(self, link: Link, message: Message) -> None:
        """Take what a node says. What cannot be read counts as not said."""
        answers = self._answers.get(link.rank)
        if answers is None:
            return
        try:
            _note(answers, message)
        except (KeyError, TypeError, ValueError, RecordError) as error:
            _log.warning("what node %s says of itself cannot be read: %s", link.name, error)

    async def report(self) -> PreflightReport:
        """The verdicts over all nodes that have joined. It never fails: what is not known is not checked."""
        began_at = time.monotonic()
        own = await self._own.facts(self._node.head)
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        await _wait_for_all([one.has_facts for one in answers], GPUS_S + _SPARE_S)
        own_unreached = await self._reach(answers) if answers else None
        reports = [
            NodeReport(name=self._node.allocation.node_name, facts=own, unreached=own_unreached),
            *map(_report, answers),
        ]
        return PreflightReport(
            verdicts=judge(reports, needs_of(self._node)),
            num_nodes=len(reports),
            took_s=time.monotonic() - began_at,
            began_at=self._began_at,
        )

    async def _reach(self, answers: list[_Answers]) -> dict[str, str] | None:
        """Have all nodes try all others; returns which the head does not reach."""
        peers = [one.peer for one in answers if one.peer is not None]
        try:
            listener = PeerListener(self._node.allocation.node_name, self._node.head, self._node.token)
        except OSError:  # the head's address is not one of this node's own, as behind a translation
            return None
        try:
            everybody = [listener.peer, *peers]
            for one in answers:
                others = [[it.name, it.address, it.port] for it in everybody if it is not one.peer]
                await one.link.send("peers", peers=others)
            unreached = await find_unreached(peers, self._node.token, within_s=REACH_S)
            await _wait_for_all([one.has_tried for one in answers if one.peer], REACH_S + _SPARE_S)
        finally:
            await asyncio.to_thread(listener.close)
        return unreached


def _note(answers: _Answers, message: Message) -> None:
    kind = message.get("kind")
    if kind == "clock":
        now = message["now"]
        if not isinstance(now, int | float):
            raise ValueError("its time is no number")
        answers.clock = ClockReading(asked_at=answers.asked_at, told=float(now), heard_at=time.time())
    elif kind == "facts":
        link = answers.link
        try:
            answers.facts = from_json_text(NodeFacts, str(message["facts"]), source="its facts")
            answers.peer = Peer(name=link.name, address=answers.facts.address, port=int(message["port"]))
        finally:
            answers.has_facts.set()
    elif kind == "unreached":
        try:
            answers.unreached = dict(texts(message["nodes"]))
        finally:
            answers.has_tried.set()


def _report(answers: _Answers) -> NodeReport:
    clock = answers.clock
    return NodeReport(
        name=answers.link.name,
        facts=answers.facts,
        clock_ahead_s=clock.ahead_s if clock is not None else 0.0,
        clock_error_s=clock.error_s if clock is not None else 0.0,
        unreached=answers.unreached,
    )


async def _wait_for_all(events: list[asyncio.Event], within_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), within_s)


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
