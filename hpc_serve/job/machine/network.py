"""The addresses of this node, and free ports on it. Other users' programs may run on the same node.

A launcher's own sockets bind port 0, so that the kernel chooses, and listen at once. A program of Ray's or vLLM's that
must be told a port gets a free one, chosen at random. If it is taken meanwhile, that program fails to bind it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError

LOOPBACK = "127.0.0.1"
_FIRST_PORT = 10_240
_DEFAULT_EPHEMERAL_START = 32_768
# Connections that wait to be accepted; the kernel takes no more than its net.core.somaxconn.
_MOST_WAITING = 4_096
_NO_FREE_PORT = "This node has no free port left: other programs on it have bound them all."
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IP_LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortsInUseError(HpcServeError):
    """A chosen port or folder was taken before it was used. The batch script starts again with others (exit 75)."""

    exit_code = 75


def choose_port() -> int:
    """Return a port of this node that is free now, chosen at random, so that nobody can take it beforehand.

    It lies below the ports of outgoing connections, as long as one of those is free. Raises PortsInUseError.
    """
    candidates = list(range(_FIRST_PORT, _ephemeral_start()))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if not _in_use(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        try:
            bound.bind(("", 0))
        except OSError as error:
            raise PortsInUseError(_NO_FREE_PORT) from error
        return int(bound.getsockname()[1])


def hold_port() -> socket.socket:
    """Open a socket on a free port. While it is open, this user's programs that set SO_REUSEPORT can listen on that
    port.

    Nobody else's can. It is for a program that is told its port on its command line, where everybody can read it long
    before the program listens. Raises PortsInUseError.
    """
    while True:
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("", choose_port()))
            return holder
        except BaseException as error:
            holder.close()
            if not (isinstance(error, OSError) and error.errno == errno.EADDRINUSE):
                raise


def listen_on(port: int = 0, *, host: str = "", most_waiting: int = _MOST_WAITING) -> socket.socket:
    """Listen on `port`; 0 is a port of the kernel's choice. Nobody else can take the port from then on.

    `host` is the address; "" stands for all. `most_waiting` connections wait at most, and one. Raises PortsInUseError.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if port:  # the last run's connections may keep it in TIME_WAIT
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(most_waiting)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        if port:
            raise PortsInUseError(
                f"Port {port} of {socket.gethostname()} was taken by another program: leave --port out, and a free "
                "one is found."
            ) from error
        raise PortsInUseError(_NO_FREE_PORT) from error
    listener.setblocking(False)
    return listener


def _ephemeral_start() -> int:
    try:
        return int(_IP_LOCAL_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_START


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def node_address(*, interface: str | None, towards: str | None) -> str:
    """Return the IPv4 address of this node that the other nodes use.

    It is the address of `interface`, if one is given. Else it is the address from which this node reaches `towards`,
    else the address of the host name, else the address of the default route. Raises InvalidRequestError if the
    interface does not exist or has no address.
    """
    if interface:
        try:
            return interface_address(interface)
        except OSError as error:
            names = ", ".join(name for name, _ in _interfaces())
            raise InvalidRequestError(
                f"interface {interface!r} has no IPv4 address on {socket.gethostname()}; those with one: {names}."
            ) from error
    if towards:
        return _source_address(towards)
    return next(iter(reachable_addresses()), LOOPBACK)


def reachable_addresses() -> list[str]:
    """Return the IPv4 addresses of this node that other hosts may reach, without loopback.

    The order is: the host name's address, the default route's, then the other interfaces'.
    """
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with contextlib.suppress(OSError):
        found.append(_source_address("192.0.2.1"))  # TEST-NET-1: asks the routing table, sends nothing
    found += [address for _, address in _interfaces()]
    return [a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_loopback]


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, for NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    return next((name for name, own in _interfaces() if own == address), None)


def interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(packed[20:24])


def _interfaces() -> Iterator[tuple[str, str]]:
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            yield name, interface_address(name)


def _source_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
