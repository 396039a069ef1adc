"""The head's judgement: every check over every node's facts, and one verdict for each. Pure.

`checks` has the checks of one node. The checks here find out whether the nodes of a run fit together: they reach each
other, have addresses of their own, and are alike. Such a check gets the facts of its group on one node, all facts of
the node, and what all nodes have.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from hpc_serve.job.preflight import checks
from hpc_serve.job.preflight.facts import (
    CheckResult,
    GpusFacts,
    Needs,
    NetworkFacts,
    NodeFacts,
    SoftwareFacts,
    found,
    not_checked,
    ok,
    worst,
)
from hpc_serve.rendezvous.store import Level, Verdict
from hpc_serve.units import GIB

# A certificate of a run is valid from a day before it was made, by the maker's clock.
_CERTIFICATE_BACKDATED_S = 24 * 3600.0
_SKEW_S = 30.0
_SLOW_LINK_MBITS = 5_000
_SLOW_RESOLVING_S = 2.0


class Nodes:
    """The facts of all nodes that one is compared with: the most frequent values, and the versions of the first."""

    def __init__(self, known: Sequence[NodeFacts], needs: Needs) -> None:
        networks = [facts.network for facts in known if facts.network is not None]
        self.needs = needs
        self.holders = Counter(facts.address for facts in known)
        self.mtu = _usual(network.mtu for network in networks)
        self.ib_ports = _usual(network.active_ib_ports for network in networks)
        self.gpu_kind = _usual(kind for facts in known for kind in _gpu_kinds(facts.gpus, needs))
        self.versions = next((facts.software.versions for facts in known if facts.software is not None), {})


def _usual(values: Iterable[Any]) -> Any:
    """Return the most frequent value; None where there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


def _gpu_kinds(gpus: GpusFacts | None, needs: Needs) -> set[str]:
    """Return the kinds of the GPUs that the engine uses on a node."""
    listed = (gpus and gpus.cuda and gpus.cuda.devices) or (gpus and gpus.gpus) or ()
    return {f"{one.name} {one.total_bytes / GIB:.0f} GiB" for one in listed[: needs.gpus]}


def _reach(_: None, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """A node connects to each other on a port that the kernel chose, at the address that the engine uses."""
    if facts.unreached is None:
        return not_checked("it was not tried")
    if not facts.unreached:
        return ok(f"reaches {nodes.needs.num_nodes - 1} others")
    name, error = next(iter(facts.unreached.items()))
    more = f", and {len(facts.unreached) - 1} others no better" if len(facts.unreached) > 1 else ""
    level: Level | None = "warning" if nodes.needs.has_own_gloo_interface else None
    return found("unreached", level=level, name=name, address=facts.address, more=more, error=error)


def _addresses(address: str, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """No other node has the address of a node, and the node's name resolves to its address first."""
    has_others = nodes.needs.num_nodes > 1
    if has_others and nodes.holders[address] > 1:
        return found("shared address", holders=nodes.holders[address], address=address)
    if (network := facts.network) is None:
        return not_checked("the network was not looked at")
    where = f"{address}{f' ({network.interface})' if network.interface else ''}"
    if network.resolving_s > _SLOW_RESOLVING_S:
        return found("slow resolver", where=where, seconds=network.resolving_s)
    if has_others and network.resolved[:1] != (address,):
        what = "does not resolve"
        if network.resolved:
            is_loopback = ipaddress.ip_address(network.resolved[0].partition("%")[0]).is_loopback
            why = "which no other node reaches" if is_loopback else "not to that first"
            what = f"resolves to {', '.join(network.resolved[:3])}, {why}"
        return found("own name", where=where, what=what)
    return ok(where)


def _interfaces(network: NetworkFacts, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """The interfaces that somebody chose for Gloo and NCCL exist."""
    if not network.chosen or not network.interfaces:
        return ok("none is chosen")
    is_there = {
        "GLOO_SOCKET_IFNAME": lambda words: set(words.split(",")) <= set(network.interfaces),
        "NCCL_SOCKET_IFNAME": lambda words: not nodes.needs.gpus or _nccl_finds_one(words, network.interfaces),
    }
    for variable, words in network.chosen.items():
        if not is_there[variable](words):
            return found("no such interface", variable=variable, words=words, there=", ".join(network.interfaces))
    return ok(", ".join(f"{variable}={words}" for variable, words in network.chosen.items()))


def _nccl_finds_one(words: str, there: Sequence[str]) -> bool:
    """NCCL takes names by their beginning, "=" for whole names, "^" for all but these; a port may follow a name."""
    excludes, words = words.startswith("^"), words.removeprefix("^")
    is_whole, words = words.startswith("="), words.removeprefix("=")
    names = [word.partition(":")[0] for word in words.split(",") if word]
    return any(
        any(one == name if is_whole else one.startswith(name) for name in names) is not excludes for one in there
    )


def _links(network: NetworkFacts, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """All nodes have equal interface speed and MTU, and InfiniBand up on all or on none."""
    interface, mbits = network.interface, network.speed_mbits or 0
    if network.mtu != nodes.mtu:
        return found("mtu", interface=interface, mtu=network.mtu, usual=nodes.mtu)
    if network.active_ib_ports != nodes.ib_ports:
        return found("infiniband", ports=network.active_ib_ports, usual=nodes.ib_ports)
    if 0 < mbits < _SLOW_LINK_MBITS and not nodes.ib_ports:
        return found("slow link", interface=interface, gbits=mbits / 1000)
    speed = f"{mbits / 1000:g} Gbit/s" if mbits else "speed unknown"
    return ok(f"{interface or 'interface unknown'}: {speed}, {nodes.ib_ports} InfiniBand ports active")


def _clocks(_: None, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """The clock of a node agrees with the head's."""
    apart_s = abs(facts.clock_ahead_s)
    side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
    text = f"its clock is {apart_s:.1f} s {side} the head's"
    if facts.clock_ahead_s < -_CERTIFICATE_BACKDATED_S:
        return found("clock before the certificates", text=text)
    return found("clock", text=text) if apart_s > _SKEW_S else ok(f"{apart_s:.1f} s apart")


def _gpus_alike(gpus: GpusFacts, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """All GPUs are of one kind and have equal memory."""
    kinds = _gpu_kinds(gpus, nodes.needs)
    if not kinds:
        return not_checked("no GPU is known by its name")
    if kinds == {nodes.gpu_kind}:
        return ok(str(nodes.gpu_kind))
    return found("other GPUs", kinds=", ".join(sorted(kinds)), usual=nodes.gpu_kind)


def _versions(software: SoftwareFacts, facts: NodeFacts, nodes: Nodes) -> CheckResult:
    """The same packages on all nodes; Ray joins no nodes that differ in its own version or Python's."""
    head, own = nodes.versions, software.versions
    differ = [package for package in {**head, **own} if head.get(package) != own.get(package)]
    if not differ:
        return ok(", ".join(f"{package} {version}" for package, version in head.items()))
    words = ", ".join(f"{one} {own.get(one, 'missing')} (head: {head.get(one, 'missing')})" for one in differ)
    is_checked_by_ray = nodes.needs.backend == "ray" and not nodes.needs.ignores_ray_versions
    if is_checked_by_ray and any(_ray_refuses(one, head.get(one), own.get(one)) for one in differ):
        return found("versions that Ray refuses", differ=words)
    return found("other versions", differ=words)


def _ray_refuses(package: str, of_head: str | None, own: str | None) -> bool:
    if of_head is None or own is None:
        return False
    if package == "python":
        return of_head.split(".")[:2] != own.split(".")[:2]
    return package == "ray"


# -- all checks

_LONGEST = 400
_NOT_GATHERED = {"weights": "the weights are not looked for with these options", "gpus": "the GPUs were not listed"}
_Scope = Literal["node", "nodes", "several nodes"]
CHECKS: tuple[tuple[str, str, _Scope, Callable[..., CheckResult]], ...] = (
    ("addresses", "address", "nodes", _addresses),
    ("interfaces", "network", "several nodes", _interfaces),
    ("reach", "", "several nodes", _reach),
    ("links", "network", "several nodes", _links),
    ("clocks", "", "several nodes", _clocks),
    ("gpus-alike", "gpus", "nodes", _gpus_alike),
    ("versions", "software", "several nodes", _versions),
    ("commands", "software", "node", checks.commands),
    ("gpus", "gpus", "node", checks.gpus_there),
    ("gpus-working", "gpus", "node", checks.gpus_working),
    ("gpus-free", "gpus", "node", checks.gpus_free),
    ("driver", "gpus", "node", checks.driver),
    ("capability", "gpus", "node", checks.capability),
    ("weights", "weights", "node", checks.weights),
    ("memory", "memory", "node", checks.memory),
    ("shm", "memory", "node", checks.shared_memory),
    ("disk", "folders", "node", checks.folders),
    ("staging", "folders", "node", checks.staged),
    ("limits", "limits", "node", checks.limits),
    ("paths", "software", "node", checks.paths),
)
"""Name, group of facts ("": none), scope and function of each.

A function gets the facts of its group on one node, all facts of the node, and by its scope a third argument: the needs
("node"), or what all nodes have ("nodes", "several nodes"). A run of one node skips the scope "several nodes".
"""


def judge(facts: Mapping[str, NodeFacts | None], needs: Needs) -> tuple[Verdict, ...]:
    """Return one verdict for each check. `facts` are of all nodes, the head's first; None: none came in time."""
    verdicts = []
    for name, group, results in run_checks(facts, needs):
        decisive = worst(results.values())
        verdict = Verdict(
            check=name,
            level=decisive.level,
            nodes=tuple(node for node, one in results.items() if one.level == decisive.level),
            seen=decisive.text if len(decisive.text) <= _LONGEST else f"{decisive.text[:_LONGEST]} …",
            cure=decisive.cure,
            took_s=max((one.took_s.get(group, 0.0) for one in facts.values() if one is not None), default=0.0),
        )
        verdicts.append(verdict)
    return tuple(verdicts)


def run_checks(
    facts: Mapping[str, NodeFacts | None], needs: Needs
) -> Iterator[tuple[str, str, dict[str, CheckResult]]]:
    """Yield each check: its name, its group of facts, and what it finds on each node."""
    nodes = Nodes([one for one in facts.values() if one is not None], needs)
    for name, group, scope, check in CHECKS:
        if scope == "several nodes" and len(facts) == 1:
            yield name, group, dict.fromkeys(facts, not_checked("there is one node"))
        else:
            yield name, group, {node: _of_node(one, group, scope, check, nodes) for node, one in facts.items()}


def _of_node(
    facts: NodeFacts | None, group: str, scope: _Scope, check: Callable[..., CheckResult], nodes: Nodes
) -> CheckResult:
    needs = nodes.needs
    if facts is None:
        return not_checked("the node sent no facts in time")
    if not group:
        return check(None, facts, nodes)
    if group == "gpus" and not needs.gpus:
        return not_checked("the engine needs no GPUs")
    if (of_group := getattr(facts, group)) is None:
        return not_checked(facts.problems.get(group) or _NOT_GATHERED.get(group, f"no facts of {group}"))
    return check(of_group, facts, needs if scope == "node" else nodes)
