"""Ports and addresses on a shared node: a stranger's port is passed over, and no number of them stops a start."""

from __future__ import annotations

import contextlib
import socket

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.machine import network
from hpc_serve.job.machine.network import PortsInUseError


def test_ports_are_chosen_below_those_of_outgoing_connections_and_not_twice_alike():
    first, second = network.choose_ports(8), network.choose_ports(8)
    assert len(set(first)) == 8
    assert all(10_240 <= port < network._ephemeral_start() for port in first)
    assert first != second  # by chance alone once in 10^30


def test_a_port_that_somebody_listens_on_is_said_to_be_taken_and_not_chosen(monkeypatch):
    (taken, free) = network.choose_ports(2)
    with socket.create_server(("", taken)):
        with pytest.raises(PortsInUseError, match=str(taken)):
            network.listen_on(taken)
        monkeypatch.setattr(network, "_FIRST_PORT", 0)
        monkeypatch.setattr(network, "_ephemeral_start", lambda: 2)
        monkeypatch.setattr(network, "_in_use", lambda port, ask=network._in_use: ask((taken, free)[port]))
        assert network.choose_ports(1) == (1,)


def test_a_stranger_who_listens_all_over_the_node_stops_no_start():
    """One socket in every 256 ports, which left no block of that size free, stops nobody any more."""
    with contextlib.ExitStack() as held:
        for port in range(network._FIRST_PORT + 9, network._ephemeral_start(), 256):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("", port)))
        network.choose_ports(2)
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


def test_where_no_port_is_free_below_the_kernel_chooses(monkeypatch):
    monkeypatch.setattr(network, "_in_use", lambda port: True)
    ports = network.choose_ports(3)
    assert len(set(ports)) == 3
    assert all(port >= network._ephemeral_start() for port in ports)


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequestError, match=r"'ib9'.* lo"):
        network.node_address(interface="ib9", towards=None)


def test_the_interface_of_an_address_is_found():
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.node_address(interface="lo", towards=None) == "127.0.0.1"
    assert network.node_address(interface=None, towards="127.0.0.1") == "127.0.0.1"


def test_the_loopback_is_not_offered_to_others():
    assert not any(address.startswith("127.") for address in network.reachable_addresses())
