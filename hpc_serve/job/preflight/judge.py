"""The head's judgement: every check over every node's facts, and one verdict for each. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from hpc_serve.job.preflight.checks import between, gpus, node, weights
from hpc_serve.job.preflight.checks.between import Nodes
from hpc_serve.job.preflight.facts import Needs, NodeFacts
from hpc_serve.job.preflight.verdict import Seen, not_checked, worst
from hpc_serve.rendezvous.preflight import Verdict

_LONGEST = 400
_NOT_GATHERED = {"weights": "the weights are not looked for with these options", "gpus": "the GPUs were not listed"}
Scope = Literal["node", "nodes", "several nodes"]
CHECKS: tuple[tuple[str, str, Scope, Callable[..., Seen]], ...] = (
    ("addresses", "address", "nodes", between.addresses),
    ("interfaces", "network", "several nodes", between.interfaces),
    ("reach", "", "several nodes", between.reach),
    ("links", "network", "several nodes", between.links),
    ("clocks", "", "several nodes", between.clocks),
    ("gpus-alike", "gpus", "nodes", between.gpus_alike),
    ("versions", "software", "several nodes", between.versions),
    ("commands", "software", "node", node.commands),
    ("gpus", "gpus", "node", gpus.gpus_there),
    ("gpus-working", "gpus", "node", gpus.gpus_working),
    ("gpus-free", "gpus", "node", gpus.gpus_free),
    ("driver", "gpus", "node", gpus.driver),
    ("capability", "gpus", "node", gpus.capability),
    ("weights", "weights", "node", weights.weights),
    ("memory", "memory", "node", node.memory),
    ("shm", "memory", "node", node.shared_memory),
    ("disk", "folders", "node", node.folders),
    ("staging", "folders", "node", node.staged),
    ("limits", "limits", "node", node.limits),
    ("paths", "software", "node", node.paths),
)
"""Name, group of facts ("": none), scope and function of each. A function gets the facts of its group on one node.

After them it gets all facts of the node and, for "node", the needs; else what all nodes have.
"""


def judge(facts: Mapping[str, NodeFacts | None], needs: Needs) -> tuple[Verdict, ...]:
    """Return one verdict for each check. `facts` are of all nodes, the head's first; None: none came in time."""
    verdicts = []
    for name, group, seen in look(facts, needs):
        decisive = worst(seen.values())
        verdict = Verdict(
            check=name,
            level=decisive.level,
            nodes=tuple(node for node, one in seen.items() if one.level == decisive.level),
            seen=decisive.text if len(decisive.text) <= _LONGEST else f"{decisive.text[:_LONGEST]} …",
            cure=decisive.cure,
            took_s=max((one.took_s.get(group, 0.0) for one in facts.values() if one is not None), default=0.0),
        )
        verdicts.append(verdict)
    return tuple(verdicts)


def look(facts: Mapping[str, NodeFacts | None], needs: Needs) -> Iterator[tuple[str, str, dict[str, Seen]]]:
    """Yield each check: its name, its group of facts, and what it finds on each node."""
    nodes = Nodes([one for one in facts.values() if one is not None], needs)
    for name, group, scope, check in CHECKS:
        if scope == "several nodes" and len(facts) == 1:
            yield name, group, dict.fromkeys(facts, not_checked("there is one node"))
        else:
            yield name, group, {node: _of_node(one, group, scope, check, nodes) for node, one in facts.items()}


def _of_node(facts: NodeFacts | None, group: str, scope: Scope, check: Callable[..., Seen], nodes: Nodes) -> Seen:
    needs = nodes.needs
    if facts is None:
        return not_checked("the node sent no facts in time")
    if not group:
        return check(None, facts, nodes)
    if group == "gpus" and not needs.gpus:
        return not_checked("the engine needs no GPUs")
    if (seen := getattr(facts, group)) is None:
        return not_checked(facts.problems.get(group) or _NOT_GATHERED.get(group, f"no facts of {group}"))
    return check(seen, facts, needs if scope == "node" else nodes)
