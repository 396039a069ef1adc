"""The node of a run: where Ray and an engine's processes meet, and the variables that they get."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_serve.job.machine.network import LOOPBACK, interface_of, reachable_addresses
from hpc_serve.job.run.node import LaunchOptions
from tests.support.nodes import ALLOCATION, ALONE, make_node


@pytest.mark.parametrize(("backend", "num_nodes", "is_told"), [("ray", 2, False), ("mp", 1, False), ("mp", 2, True)])
def test_processes_that_meet_without_ray_read_the_port_from_a_file(tmp_path, backend, num_nodes, is_told):
    allocation = dataclasses.replace(ALLOCATION, num_nodes=num_nodes)
    node = make_node(tmp_path, backend=backend, allocation=allocation)
    assert (str(node.settings_file) in node.rank_args()) == is_told


@pytest.mark.parametrize(("gpus", "told"), [(0, "0"), (8, None)])
def test_code_for_cpus_is_kept_in_the_only_form_that_can_be_read(tmp_path, gpus, told):
    options = LaunchOptions(service="8b", backend="mp", gpus_per_node=gpus)
    node = make_node(tmp_path, options=options)
    assert node.child_environ().get("VLLM_USE_AOT_COMPILE") == told
    by_hand = dataclasses.replace(node, environ={"VLLM_USE_AOT_COMPILE": "1"})
    assert by_hand.child_environ()["VLLM_USE_AOT_COMPILE"] == "1"


# -- Where Ray and an engine's processes meet: on the loopback address wherever they can


@pytest.mark.parametrize(("backend", "is_loopback"), [("mp", True), ("ray", False)])
def test_one_node_needs_the_network_for_ray_alone(tmp_path, backend, is_loopback):
    node = make_node(tmp_path, backend=backend, allocation=ALONE, head="10.77.0.11")
    assert node.internal_address == (LOOPBACK if is_loopback else "10.77.0.11")


def test_ray_is_never_given_a_loopback_address_where_the_host_has_another(tmp_path):
    """Ray would use another one by itself, for which its certificate does not stand."""
    node = make_node(tmp_path, backend="ray", allocation=ALONE, head=LOOPBACK)
    assert node.internal_address == next(iter(reachable_addresses()), LOOPBACK)
    assert node.child_environ().get("NCCL_SOCKET_IFNAME") == interface_of(node.internal_address)
