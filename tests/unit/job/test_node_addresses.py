"""Where Ray and an engine's processes meet: on the loopback address wherever they can."""

from __future__ import annotations

import dataclasses

import pytest

from hpc_serve.job.machine.network import LOOPBACK, reachable_addresses
from tests.support.nodes import ALLOCATION, make_node

ALONE = dataclasses.replace(ALLOCATION, num_nodes=1)


@pytest.mark.parametrize(("backend", "is_loopback"), [("mp", True), ("ray", False)])
def test_one_node_needs_the_network_for_ray_alone(tmp_path, backend, is_loopback):
    node = make_node(tmp_path, backend=backend, allocation=ALONE, head="10.77.0.11")
    assert node.internal_address == (LOOPBACK if is_loopback else "10.77.0.11")


def test_ray_is_never_given_a_loopback_address_where_the_host_has_another(tmp_path):
    """Ray would use another one by itself, for which its certificate does not stand."""
    node = make_node(tmp_path, backend="ray", allocation=ALONE, head=LOOPBACK)
    assert node.internal_address == next(iter(reachable_addresses()), LOOPBACK)
