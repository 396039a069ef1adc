"""Whether the nodes of a run fit together: they reach each other, have addresses of their own, and are alike."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hpc_serve.job.preflight.facts import NetworkFacts, NodeFacts, NodeReport
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, found, not_checked, ok
from hpc_serve.rendezvous.preflight import Level
from hpc_serve.sizes import GIB

# A certificate of a run is valid from a day before it was made, by the maker's clock.
_CERTIFICATE_BACKDATED_S = 24 * 3600.0
_SKEW_S = 30.0
_SLOW_LINK_MBITS = 5_000
_SLOW_RESOLVING_S = 2.0

# The result of a check between nodes, by the name of the node.
SeenByNode = dict[str, Seen]


def reach(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Each node connects to each other on a port that the kernel chose, at the address that the engine uses."""
    return {report.name: _reach(report, len(reports), needs) for report in reports}


def _reach(report: NodeReport, num_nodes: int, needs: Needs) -> Seen:
    if report.unreached is None:
        return not_checked("it was not tried")
    if not report.unreached:
        return ok(f"reaches {num_nodes - 1} others")
    name, error = next(iter(report.unreached.items()))
    more = f", and {len(report.unreached) - 1} others no better" if len(report.unreached) > 1 else ""
    address = f" from {report.facts.address}" if report.facts is not None else ""
    level: Level | None = "warning" if needs.has_own_gloo_interface else None
    return found("unreached", level=level, name=name, address=address, more=more, error=error)


def addresses(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that no two nodes share an address, and that each node's name resolves to its address first."""
    known = {report.name: report.facts for report in reports if report.facts is not None}
    shared = Counter(facts.address for facts in known.values())
    return {name: _address(facts, shared[facts.address], needs) for name, facts in known.items()}


def _address(facts: NodeFacts, holders: int, needs: Needs) -> Seen:
    if needs.num_nodes > 1 and holders > 1:
        return found("shared address", holders=holders, address=facts.address)
    network = facts.network
    if network is None:
        return not_checked("the network was not looked at")
    where = f"{facts.address}{f' ({network.interface})' if network.interface else ''}"
    if network.resolving_s > _SLOW_RESOLVING_S:
        return found("slow resolver", where=where, seconds=network.resolving_s)
    if needs.num_nodes > 1 and network.resolved[:1] != (facts.address,):
        what = "does not resolve"
        if network.resolved:
            is_loopback = ipaddress.ip_address(network.resolved[0].partition("%")[0]).is_loopback
            why = "which no other node reaches" if is_loopback else "not to that first"
            what = f"resolves to {', '.join(network.resolved[:3])}, {why}"
        return found("own name", where=where, what=what)
    return ok(where)


def interfaces(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that the interfaces that somebody chose for Gloo and NCCL exist."""
    return {name: _chosen_interfaces(network, needs) for name, network in _networks(reports).items()}


def _networks(reports: Sequence[NodeReport]) -> dict[str, NetworkFacts]:
    return {report.name: report.facts.network for report in reports if report.facts and report.facts.network}


def _chosen_interfaces(network: NetworkFacts, needs: Needs) -> Seen:
    if not network.chosen or not network.interfaces:
        return ok("none is chosen")
    is_there = {
        "GLOO_SOCKET_IFNAME": lambda words: set(words.split(",")) <= set(network.interfaces),
        "NCCL_SOCKET_IFNAME": lambda words: not needs.gpus or _nccl_finds_one(words, network.interfaces),
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


def links(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that all nodes have equal interface speed and MTU, and InfiniBand up on all or on none."""
    networks = _networks(reports)
    mtu = _usual([network.mtu for network in networks.values()])
    ports = _usual([network.active_ib_ports for network in networks.values()])
    return {name: _link(network, mtu, ports) for name, network in networks.items()}


def _link(network: NetworkFacts, mtu: object, ports: object) -> Seen:
    interface, mbits = network.interface, network.speed_mbits or 0
    if network.mtu != mtu:
        return found("mtu", interface=interface, mtu=network.mtu, usual=mtu)
    if network.active_ib_ports != ports:
        return found("infiniband", ports=network.active_ib_ports, usual=ports)
    if 0 < mbits < _SLOW_LINK_MBITS and not ports:
        return found("slow link", interface=interface, gbits=mbits / 1000)
    speed = f"{mbits / 1000:g} Gbit/s" if mbits else "speed unknown"
    return ok(f"{interface or 'interface unknown'}: {speed}, {ports} InfiniBand ports active")


def clocks(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that the nodes' clocks agree with the head's."""
    return {report.name: _clock(report) for report in reports}


def _clock(report: NodeReport) -> Seen:
    apart_s = abs(report.clock_ahead_s)
    side = "ahead of" if report.clock_ahead_s > 0 else "behind"
    text = f"its clock is {apart_s:.1f} s {side} the head's"
    if report.clock_ahead_s < -_CERTIFICATE_BACKDATED_S:
        return found("clock before the certificates", text=text)
    return found("clock", text=text) if apart_s > _SKEW_S else ok(f"{apart_s:.1f} s apart")


def gpus_alike(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that all GPUs are of one kind and have equal memory."""
    kinds: dict[str, set[str]] = {}
    for report in reports:
        gpus = report.facts.gpus if report.facts is not None else None
        listed = (gpus and gpus.cuda and gpus.cuda.devices) or (gpus and gpus.gpus) or ()
        if listed:
            kinds[report.name] = {f"{one.name} {one.total_bytes / GIB:.0f} GiB" for one in listed[: needs.gpus]}
    if not needs.gpus or not kinds:
        return {reports[0].name: not_checked("no GPU is known by its name")}
    usual = _usual([kind for of_node in kinds.values() for kind in of_node])
    return {
        name: ok(str(usual))
        if of_node == {usual}
        else found("other GPUs", kinds=", ".join(sorted(of_node)), usual=usual)
        for name, of_node in kinds.items()
    }


def versions(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """The same packages on all nodes; Ray joins no nodes that differ in its own version or Python's."""
    known = {
        report.name: report.facts.software.versions for report in reports if report.facts and report.facts.software
    }
    head = next(iter(known.values()), {})
    return {name: _versions(head, own, needs) for name, own in known.items()}


def _versions(head: Mapping[str, str], own: Mapping[str, str], needs: Needs) -> Seen:
    differ = [package for package in {**head, **own} if head.get(package) != own.get(package)]
    if not differ:
        return ok(", ".join(f"{package} {version}" for package, version in head.items()))
    words = ", ".join(f"{one} {own.get(one, 'missing')} (head: {head.get(one, 'missing')})" for one in differ)
    is_checked_by_ray = needs.backend == "ray" and not needs.ignores_ray_versions
    if is_checked_by_ray and any(_ray_refuses(one, head.get(one), own.get(one)) for one in differ):
        return found("versions that Ray refuses", differ=words)
    return found("other versions", differ=words)


def _ray_refuses(package: str, of_head: str | None, own: str | None) -> bool:
    if of_head is None or own is None:
        return False
    if package == "python":
        return of_head.split(".")[:2] != own.split(".")[:2]
    return package == "ray"


def _usual(values: Sequence[object]) -> object:
    """Return the most frequent value; None where there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


BETWEEN_CHECKS: tuple[tuple[str, str, bool, Callable[[Sequence[NodeReport], Needs], SeenByNode]], ...] = (
    ("addresses", "network", False, addresses),
    ("interfaces", "network", True, interfaces),
    ("reach", "reach", True, reach),
    ("links", "network", True, links),
    ("clocks", "", True, clocks),
    ("gpus-alike", "gpus", False, gpus_alike),
    ("versions", "software", True, versions),
)
"""Name, group of facts, whether it needs several nodes, and function of each."""
