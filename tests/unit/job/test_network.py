"""Ports and addresses on a shared node: a stranger's port is passed over, and no number of them stops a start."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine import network
from hpc_serve.job.machine.network import PortsInUseError

EPHEMERAL_START = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_ports_are_chosen_below_those_of_outgoing_connections_and_not_twice_alike():
    ports = [network.choose_port() for _ in range(16)]
    assert all(10_240 <= port < EPHEMERAL_START for port in ports)
    assert len(set(ports)) > 1  # by chance alone once in 10^60


def test_a_port_that_somebody_listens_on_is_said_to_be_taken_and_not_chosen(monkeypatch):
    taken = network.choose_port()
    monkeypatch.setattr(network, "_FIRST_PORT", taken)
    monkeypatch.setattr(network, "_ephemeral_start", lambda: taken + 1)
    with socket.create_server(("", taken)):
        with pytest.raises(PortsInUseError, match=str(taken)):
            network.listen_on(taken)
        assert network.choose_port() >= EPHEMERAL_START  # the kernel chooses where no port is free below


def test_a_stranger_who_listens_all_over_the_node_stops_no_start():
    with contextlib.ExitStack() as held:
        for port in range(10_249, EPHEMERAL_START, 256):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
        network.choose_port()
        network.listen_on().close()


def test_a_held_port_is_for_programs_of_the_same_user_that_share_it():
    with network.hold_port() as holder, socket.socket() as server:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", port))
        server.listen()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:  # none of them goes to the holder
                pass


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequestError, match=r"'ib9'.* lo"):
        network.node_address(interface="ib9", towards=None)


def test_the_interface_of_an_address_is_found():
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.node_address(interface="lo", towards=None) == "127.0.0.1"
    assert network.node_address(interface=None, towards="127.0.0.1") == "127.0.0.1"


def test_the_loopback_is_not_offered_to_others():
    assert not any(address.startswith("127.") for address in network.reachable_addresses())
