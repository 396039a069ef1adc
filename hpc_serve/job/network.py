"""The addresses of this node, and blocks of free ports on it. Other users' programs may run on the same node.

A launcher reserves a block by listening on its first port, so two launchers on one node never use the same block. A
block with a port in use is not chosen. A port that is taken later shows when the program it was meant for binds it.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import HpcServeError, InvalidRequestError

BLOCK_SIZE = 256
_FIRST_PORT = 10_240
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IP_LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortsInUseError(HpcServeError):
    """A chosen port or folder was taken before it was used. The batch script starts again with others (exit 75)."""

    exit_code = 75


@dataclass(frozen=True)
class PortBlock:
    """A block of BLOCK_SIZE ports that begins at `base`, and what each port is for."""

    base: int

    @property
    def control(self) -> int:
        """The launcher listens here to reserve the block. On the head it is also the control port."""
        return self.base

    @property
    def gcs(self) -> int:
        return self.base + 1

    @property
    def node_manager(self) -> int:
        return self.base + 2

    @property
    def object_manager(self) -> int:
        return self.base + 3

    @property
    def dashboard_agent_listen(self) -> int:
        return self.base + 4

    @property
    def dashboard_agent_grpc(self) -> int:
        return self.base + 5

    @property
    def runtime_env_agent(self) -> int:
        return self.base + 6

    @property
    def metrics_export(self) -> int:
        return self.base + 7

    @property
    def ray_client_server(self) -> int:
        return self.base + 8

    @property
    def engine(self) -> int:
        return self.base + 9

    @property
    def torch_master(self) -> int:
        """vLLM's multi-node executor without Ray meets here (`--master-port`)."""
        return self.base + 10

    @property
    def engine_internal(self) -> int:
        """The first port that vLLM chooses for itself (`VLLM_PORT`); it counts upwards from here."""
        return self.base + 16

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port of Ray's worker processes."""
        return self.base + 64, self.base + BLOCK_SIZE - 1


def choose_port_block() -> PortBlock:
    """A block of which no port is in use now. Raises PortsInUseError if there is none."""
    block, listener = reserve_free_block()
    listener.close()
    return block


def reserve(block: PortBlock) -> socket.socket:
    """Listen on the block's first port, on all interfaces. Raises PortsInUseError if another program does.

    The block stays reserved until the returned socket is closed.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("", block.control))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortsInUseError(f"Port {block.control} was taken by another program.") from error
        raise
    listener.setblocking(False)
    return listener


def reserve_free_block() -> tuple[PortBlock, socket.socket]:
    """Choose a block and reserve it (see `reserve`). Raises PortsInUseError if no block is free."""
    for block in _shuffled_blocks():
        if _is_free(block):
            try:
                return block, reserve(block)
            except PortsInUseError:
                continue
    raise PortsInUseError(f"No {BLOCK_SIZE} consecutive free ports below the ephemeral range on this node.")


def _shuffled_blocks() -> list[PortBlock]:
    try:
        last = int(_IP_LOCAL_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        last = 32_768
    blocks = [PortBlock(base) for base in range(_FIRST_PORT, last - BLOCK_SIZE, BLOCK_SIZE)]
    random.shuffle(blocks)
    return blocks


def _is_free(block: PortBlock) -> bool:
    return not any(_in_use(port) for port in range(block.base, block.base + BLOCK_SIZE))


def _in_use(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def node_address(*, interface: str | None, towards: str | None) -> str:
    """The IPv4 address of this node that the other nodes use.

    It is the address of `interface` if that is given, else the address from which this node reaches `towards`, else
    the address of the host name, else that of the default route. Raises InvalidRequestError if the interface does not
    exist or has no address.
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
    return next(iter(reachable_addresses()), "127.0.0.1")


def reachable_addresses() -> list[str]:
    """The IPv4 addresses of this node that other hosts may reach, without loopback.

    The order is: the host name's, the default route's, those of the other interfaces.
    """
    found: list[str] = []
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError:
        pass
    try:
        found.append(_source_address("192.0.2.1"))  # TEST-NET-1: asks the routing table, sends nothing
    except OSError:
        pass
    found += [address for _, address in _interfaces()]
    return [a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_loopback]


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, for NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    return next((name for name, own in _interfaces() if own == address), None)


def interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(packed[20:24])


def _interfaces() -> Iterator[tuple[str, str]]:
    for _, name in socket.if_nameindex():
        try:
            yield name, interface_address(name)
        except OSError:
            continue


def _source_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
