"""The rates at which the GPUs of a layout send to each other: within a node, and over the network."""

from __future__ import annotations

from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.hardware.accelerator import AcceleratorSpec

ASSUMED_LINK_BYTES_PER_S = 32e9
"""PCIe 4.0 x16: assumed where no source confirms a rate between the GPUs of a node."""
ASSUMED_NETWORK_BYTES_PER_S = 12.5e9
"""100 Gb/s for each GPU: assumed where no source confirms a network."""


def link_rate(accelerator: AcceleratorSpec, layout: Layout) -> float:
    """Return the rate at which a rank sends to its tensor-parallel group, in bytes per second."""
    if layout.splits_layers_across_nodes and accelerator.kind != "tpu":
        return network_rate(accelerator)
    return rate_in_node(accelerator, layout.tensor_parallel_size)


def rate_in_node(accelerator: AcceleratorSpec, ranks: int) -> float:
    """Return the rate at which a rank sends to a group of so many in its node, in bytes per second.

    In a mesh every pair has its own link: a group smaller than the node has only the links between its members. A
    bridge of two GPUs is of no use to more.
    """
    rate = accelerator.link_bytes_per_s or ASSUMED_LINK_BYTES_PER_S
    if accelerator.link_topology == "pairs" and ranks > 2:
        return ASSUMED_LINK_BYTES_PER_S
    if accelerator.link_topology == "mesh" and 1 < ranks < accelerator.gpus_per_node:
        return rate * (ranks - 1) / (accelerator.gpus_per_node - 1)
    return rate


def network_rate(accelerator: AcceleratorSpec) -> float:
    """Return one GPU's share of its node's network, in bytes per second, one direction."""
    return accelerator.network_bytes_per_s or ASSUMED_NETWORK_BYTES_PER_S
