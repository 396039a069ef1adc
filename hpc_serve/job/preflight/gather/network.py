"""The interface of a node towards the others, its InfiniBand ports, and what the node's own name resolves to."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_serve.job.machine.network import interface_of
from hpc_serve.job.preflight.facts import NetworkFacts

_SYS = Path("/sys/class")
_MOST_ADDRESSES = 8
_CHOOSES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def gather_network(address: str, environ: Mapping[str, str], *, sys_class: Path = _SYS) -> NetworkFacts:
    interface = interface_of(address) or ""
    folder = sys_class / "net" / interface
    began_at = time.monotonic()
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        resolved = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))[:_MOST_ADDRESSES]
    except OSError:
        resolved = ()
    return NetworkFacts(
        interface=interface,
        speed_mbits=_number(folder / "speed"),
        mtu=_number(folder / "mtu"),
        resolved=resolved,
        resolving_s=time.monotonic() - began_at,
        active_ib_ports=_active_ib_ports(sys_class / "infiniband"),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        chosen={name: environ[name] for name in _CHOOSES if environ.get(name)},
    )


def _active_ib_ports(folder: Path) -> int:
    try:
        return sum("ACTIVE" in state.read_text() for state in folder.glob("*/ports/*/state"))
    except OSError:
        return 0


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):  # a virtual interface has no speed
        return None
    return value if value > 0 else None
