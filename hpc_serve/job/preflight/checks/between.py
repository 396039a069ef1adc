"""Whether the nodes of a run fit together: they reach each other, have addresses of their own, and are alike."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence

from hpc_serve.job.preflight.facts import NetworkFacts, NodeFacts, NodeReport
from hpc_serve.job.preflight.needs import Needs
from hpc_serve.job.preflight.verdict import Seen, failed, not_checked, ok, warning

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
    text = f"cannot connect to {name}{address}{more} ({error})"
    cure = (
        "A firewall between the nodes, or the wrong network: name the interface that joins them (HPC_SERVE_INTERFACE, "
        "interface in the site file); Ray, Gloo and NCCL connect to any port of a node."
    )
    return warning(text, cure) if needs.has_own_gloo_interface else failed(text, cure)


def addresses(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that no two nodes share an address, and that each node's name resolves to its address first."""
    found = {report.name: report.facts for report in reports if report.facts is not None}
    shared = Counter(facts.address for facts in found.values())
    return {name: _address(facts, shared[facts.address], needs) for name, facts in found.items()}


def _address(facts: NodeFacts, holders: int, needs: Needs) -> Seen:
    cure = "Name the interface that joins the nodes in HPC_SERVE_INTERFACE (interface in the site file)."
    if needs.num_nodes > 1 and holders > 1:
        return failed(f"{holders} nodes say that their address is {facts.address}; each needs its own", cure)
    network = facts.network
    if network is None:
        return not_checked("the network was not looked at")
    where = f"{facts.address}{f' ({network.interface})' if network.interface else ''}"
    if network.resolving_s > _SLOW_RESOLVING_S:
        return warning(
            f"{where}; its own name took {network.resolving_s:.1f} s to resolve",
            "The node's resolver is slow or away: every process of the engine waits for it. Tell its administrators.",
        )
    first = next(iter(network.resolved), "")
    if needs.num_nodes > 1 and first != facts.address:
        what = f"resolves to {', '.join(network.resolved[:3])}" if first else "does not resolve"
        is_loopback = bool(first) and ipaddress.ip_address(first.partition("%")[0]).is_loopback
        why = "which no other node reaches" if is_loopback else "not to that first"
        return warning(
            f"{where}; its own name {what}{f', {why}' if first else ''}",
            "hpc-serve tells Ray and vLLM the address; a library that asks the name (HOST_IP, MASTER_ADDR) goes wrong.",
        )
    return ok(where)


def interfaces(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that the interfaces that somebody chose for Gloo and NCCL exist."""
    found = {report.name: report.facts.network for report in reports if report.facts and report.facts.network}
    return {name: _chosen_interfaces(network, needs) for name, network in found.items()}


def _chosen_interfaces(network: NetworkFacts, needs: Needs) -> Seen:
    if not network.chosen or not network.interfaces:
        return ok("none is chosen")
    is_there = {
        "GLOO_SOCKET_IFNAME": lambda words: set(words.split(",")) <= set(network.interfaces),
        "NCCL_SOCKET_IFNAME": lambda words: not needs.gpus or _nccl_finds_one(words, network.interfaces),
    }
    for variable, words in network.chosen.items():
        if not is_there[variable](words):
            return failed(
                f"{variable} is {words}, and the node has {', '.join(network.interfaces)}",
                f"Unset {variable}: the launcher sets it to the interface of the node's address "
                "(HPC_SERVE_INTERFACE, interface in the site file).",
            )
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
    found = {report.name: report.facts.network for report in reports if report.facts and report.facts.network}
    if not found:
        return {}
    mtu = _usual([network.mtu for network in found.values()])
    ports = _usual([network.active_ib_ports for network in found.values()])
    seen: SeenByNode = {}
    for name, network in found.items():
        if network.mtu != mtu:
            text = f"{network.interface} has MTU {network.mtu}, the others {mtu}"
            seen[name] = warning(
                text, "Large messages may hang: tell the administrators, or exclude the node (--exclude)."
            )
        elif network.active_ib_ports != ports:
            text = f"{network.active_ib_ports} InfiniBand ports are active, {ports} on the others"
            seen[name] = warning(
                text, "NCCL takes TCP, or fails: tell the administrators, or exclude the node (--exclude)."
            )
        elif network.speed_mbits is not None and 0 < network.speed_mbits < _SLOW_LINK_MBITS and not ports:
            text = f"{network.interface} has {network.speed_mbits / 1000:g} Gbit/s, and there is no InfiniBand"
            cure = (
                "If the nodes have a faster network, name its interface in HPC_SERVE_INTERFACE (interface in the site "
                "file)."
            )
            seen[name] = warning(text, cure)
        else:
            speed = f"{network.speed_mbits / 1000:g} Gbit/s" if network.speed_mbits else "speed unknown"
            seen[name] = ok(f"{network.interface or 'interface unknown'}: {speed}, {ports} InfiniBand ports active")
    return seen


def clocks(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that the nodes' clocks agree with the head's."""
    return {report.name: _clock(report) for report in reports}


def _clock(report: NodeReport) -> Seen:
    apart_s = abs(report.clock_ahead_s)
    side = "ahead of" if report.clock_ahead_s > 0 else "behind"
    text = f"its clock is {apart_s:.1f} s {side} the head's"
    cure = "Tell the node's administrators (NTP, chrony), or exclude the node (--exclude)."
    if report.clock_ahead_s < 0 and apart_s > _CERTIFICATE_BACKDATED_S:
        return failed(f"{text}, so the run's certificates are not valid there yet", cure)
    return warning(text, cure) if apart_s > _SKEW_S else ok(f"{apart_s:.1f} s apart")


def gpus_alike(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """Check that all GPUs are of one kind and have equal memory."""
    names: dict[str, tuple[str, ...]] = {}
    for report in reports:
        gpus = report.facts.gpus if report.facts is not None else None
        if gpus is not None and gpus.cuda is not None and gpus.cuda.devices:
            names[report.name] = tuple(_kind(one.name, one.total_bytes) for one in gpus.cuda.devices[: needs.gpus])
        elif gpus is not None and gpus.gpus:
            names[report.name] = tuple(_kind(one.name, one.total_bytes) for one in gpus.gpus[: needs.gpus])
    if not needs.gpus or not any(names.values()):
        return {reports[0].name: not_checked("no GPU is known by its name")}
    usual = _usual([kind for kinds in names.values() for kind in kinds])
    cure = "The slowest sets the pace, and the least memory the cache: --constraint or a typed --gres names one kind."
    return {
        name: ok(str(usual))
        if set(kinds) == {usual}
        else warning(f"{', '.join(sorted(set(kinds)))}; most are {usual}", cure)
        for name, kinds in names.items()
    }


def _kind(name: str, total_bytes: int) -> str:
    return f"{name} {total_bytes / 2**30:.0f} GiB"


def versions(reports: Sequence[NodeReport], needs: Needs) -> SeenByNode:
    """The same packages on all nodes; Ray joins no nodes that differ in its own version or Python's."""
    found = {report.name: report.facts.software for report in reports if report.facts and report.facts.software}
    if not found:
        return {}
    head = next(iter(found.values())).versions
    seen: SeenByNode = {}
    for name, software in found.items():
        differ = [
            package for package in {**head, **software.versions} if head.get(package) != software.versions.get(package)
        ]
        if not differ:
            seen[name] = ok(", ".join(f"{package} {version}" for package, version in head.items()))
            continue
        words = ", ".join(
            f"{one} {software.versions.get(one, 'missing')} (head: {head.get(one, 'missing')})" for one in differ
        )
        cure = "Use one environment on a filesystem that all nodes see (HPC_SERVE_ENV), or the same image on each."
        is_final = (
            needs.backend == "ray"
            and not needs.ignores_ray_versions
            and any(_ray_refuses(one, head.get(one), software.versions.get(one)) for one in differ)
        )
        seen[name] = (
            failed(words, f"Ray joins no nodes that differ in it. {cure}") if is_final else warning(words, cure)
        )
    return seen


def _ray_refuses(package: str, of_head: str | None, own: str | None) -> bool:
    if of_head is None or own is None:
        return False
    if package == "python":
        return of_head.split(".")[:2] != own.split(".")[:2]
    return package == "ray"


def _usual(values: Sequence[object]) -> object:
    return Counter(values).most_common(1)[0][0]


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
