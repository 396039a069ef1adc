"""Ports and addresses on a shared node: no two of ours take one block, a stranger's port is seen."""

from __future__ import annotations

import socket

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job import network
from hpc_serve.job.network import BLOCK_SIZE, PortBlock, PortsInUseError


def test_every_port_of_a_block_is_its_own_and_inside_it():
    block = PortBlock(10_240)
    named = [
        *(block.control, block.gcs, block.node_manager, block.object_manager, block.dashboard_agent_listen),
        *(block.dashboard_agent_grpc, block.runtime_env_agent, block.metrics_export, block.ray_client_server),
        *(block.engine, block.torch_master, block.engine_internal, block.workers[0]),
    ]
    assert len(set(named)) == len(named)
    assert all(block.base <= port < block.base + BLOCK_SIZE for port in (*named, *block.workers))


def test_a_held_block_is_not_given_twice(monkeypatch):
    first, listener = network.reserve_free_block()
    others = [PortBlock(first.base), PortBlock(first.base + BLOCK_SIZE)]
    monkeypatch.setattr(network, "_shuffled_blocks", lambda: list(others))
    with listener:
        assert network.choose_port_block() == others[1]
        with pytest.raises(PortsInUseError, match=str(first.control)):
            network.reserve(first)
    assert network.choose_port_block() == first


def test_a_block_with_a_strangers_port_is_passed_over(monkeypatch):
    block = network.choose_port_block()
    monkeypatch.setattr(network, "_shuffled_blocks", lambda: [block])
    with socket.create_server(("", block.engine)), pytest.raises(PortsInUseError, match="consecutive free ports"):
        network.choose_port_block()


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidRequestError, match=r"'ib9'.* lo"):
        network.node_address(interface="ib9", towards=None)


def test_the_interface_of_an_address_is_found():
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.node_address(interface="lo", towards=None) == "127.0.0.1"
    assert network.node_address(interface=None, towards="127.0.0.1") == "127.0.0.1"


def test_the_loopback_is_not_offered_to_others():
    assert not any(address.startswith("127.") for address in network.reachable_addresses())
