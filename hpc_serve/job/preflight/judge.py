"""The head's judgement: every check over every node's facts, and one verdict for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpc_serve.job.preflight.checks import gpus, node, weights
from hpc_serve.job.preflight.checks.between import BETWEEN_CHECKS
from hpc_serve.job.preflight.facts import NodeFacts, NodeReport
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, not_checked, shortened, worst
from hpc_serve.rendezvous.preflight import Verdict

NODE_CHECKS: tuple[tuple[str, str, Callable[[NodeFacts, Needs], Seen]], ...] = (
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
    one_node = {reports[0].name: not_checked("there is one node")} if len(reports) == 1 else None
    between = [
        _verdict(name, group, reports, (needs_several and one_node) or check(reports, needs))
        for name, group, needs_several, check in BETWEEN_CHECKS
    ]
    each = [
        _verdict(name, group, reports, {report.name: _of_node(report, group, check, needs) for report in reports})
        for name, group, check in NODE_CHECKS
    ]
    return (*between, *each)


def _of_node(report: NodeReport, group: str, check: Callable[[NodeFacts, Needs], Seen], needs: Needs) -> Seen:
    if report.facts is None:
        return not_checked("the node sent no facts in time")
    if getattr(report.facts, group) is None and (problem := report.facts.problems.get(group)):
        return not_checked(problem)
    return check(report.facts, needs)


def _verdict(check: str, group: str, reports: Sequence[NodeReport], seen: Mapping[str, Seen]) -> Verdict:
    if not seen:
        return Verdict(
            check=check, level="not checked", nodes=(reports[0].name,), seen="no node sent its facts in time"
        )
    decisive = worst(seen.values())
    took = [report.facts.took_s.get(group, 0.0) for report in reports if report.facts is not None]
    return Verdict(
        check=check,
        level=decisive.level,
        nodes=tuple(name for name, one in seen.items() if one.level == decisive.level),
        seen=shortened(decisive.text),
        cure=decisive.cure,
        took_s=max(took, default=0.0),
    )
