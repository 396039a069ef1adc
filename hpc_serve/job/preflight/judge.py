"""The head's judgement: every check over every node's facts, and one verdict for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpc_serve.job.preflight.checks import gpus, node, weights
from hpc_serve.job.preflight.checks.between import BETWEEN_CHECKS, Nodes
from hpc_serve.job.preflight.facts import Needs, NodeFacts, NodeReport
from hpc_serve.job.preflight.verdict import Seen, not_checked, worst
from hpc_serve.rendezvous.preflight import Verdict

_LONGEST = 400
_NOT_GATHERED = {"weights": "the weights are not looked for with these options", "gpus": "the GPUs were not listed"}
NodeCheck = Callable[[Any, NodeFacts, Needs], Seen]
"""It is called with the facts of its group, all facts of the node, and the needs."""
NODE_CHECKS: tuple[tuple[str, str, NodeCheck], ...] = (
    ("commands", "software", node.commands),
    ("gpus", "gpus", gpus.gpus_there),
    ("gpus-working", "gpus", gpus.gpus_working),
    ("gpus-free", "gpus", gpus.gpus_free),
    ("driver", "gpus", gpus.driver),
    ("capability", "gpus", gpus.capability),
    ("weights", "weights", weights.weights),
    ("memory", "memory", node.memory),
    ("shm", "memory", node.shared_memory),
    ("disk", "folders", node.folders),
    ("staging", "folders", node.staged),
    ("limits", "limits", node.limits),
    ("paths", "software", node.paths),
)
"""Name, group of facts, and function of each."""


def judge(reports: Sequence[NodeReport], needs: Needs) -> tuple[Verdict, ...]:
    """Return one verdict for each check. `reports` are of all nodes, the head's first."""
    return tuple(_verdict(name, group, reports, seen) for name, group, seen in look(reports, needs))


def look(reports: Sequence[NodeReport], needs: Needs) -> Iterator[tuple[str, str, dict[str, Seen]]]:
    """Yield each check: its name, its group of facts, and what it finds on each node."""
    nodes = Nodes(reports, needs)
    for name, group, needs_several, between in BETWEEN_CHECKS:
        if needs_several and len(reports) == 1:
            yield name, group, {reports[0].name: not_checked("there is one node")}
        else:
            yield name, group, {one.name: _of_node(one, group, needs, between, one, nodes) for one in reports}
    for name, group, check in NODE_CHECKS:
        yield name, group, {one.name: _of_node(one, group, needs, check, one.facts, needs) for one in reports}


def _of_node(report: NodeReport, group: str, needs: Needs, check: Callable[..., Seen], *others: object) -> Seen:
    """Return the finding of a check on one node. `others` are its arguments after the facts of its group."""
    facts = report.facts
    if not group:
        return check(None, *others)
    if facts is None:
        return not_checked("the node sent no facts in time")
    if group == "gpus" and not needs.gpus:
        return not_checked("the engine needs no GPUs")
    if (seen := getattr(facts, group)) is None:
        return not_checked(facts.problems.get(group) or _NOT_GATHERED.get(group, f"no facts of {group}"))
    return check(seen, *others)


def _verdict(check: str, group: str, reports: Sequence[NodeReport], seen: Mapping[str, Seen]) -> Verdict:
    decisive = worst(seen.values())
    took = [report.facts.took_s.get(group, 0.0) for report in reports if report.facts is not None]
    return Verdict(
        check=check,
        level=decisive.level,
        nodes=tuple(name for name, one in seen.items() if one.level == decisive.level),
        seen=decisive.text if len(decisive.text) <= _LONGEST else f"{decisive.text[:_LONGEST]} …",
        cure=decisive.cure,
        took_s=max(took, default=0.0),
    )
