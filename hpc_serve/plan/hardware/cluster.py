"""The machines to plan for, and the names people give them: a GPU (`h100`), a TPU slice (`v5e:4x4`, `v5e-16`), the
sockets of a CPU node (`cpu-spr-2s`), GPUs of several kinds (`a100-80gb,h100-pcie-80gb`).

One engine uses a slice, or a node named with its sockets, as a whole. On other nodes an engine uses only the
accelerators that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entry, is_accelerator
from hpc_serve.plan.hardware.accelerator import (
    AcceleratorSpec,
    accelerator,
    chip_count,
    least_of,
    same_slice,
    slice_with,
)
from hpc_serve.plan.option_values import at_least_one

DEFAULT_GPU = "h100-80gb"
"""The GPU that is planned for where nobody names one."""

_NUMBERED = re.compile(r"(.+)-(\d+)")
_SOCKETS = re.compile(r"(.+?)[-:](\d+)s")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The machines there are.

    `num_nodes` None: as few as are needed. `gpus_per_node` None: as many as such nodes usually have. `is_whole`: one
    engine uses all accelerators of all nodes, as in a TPU slice. Otherwise it uses as few as it needs.
    """

    accelerator: AcceleratorSpec
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        at_least_one(num_nodes=self.num_nodes, gpus_per_node=self.gpus_per_node)

    @property
    def node_size(self) -> int:
        """GPUs of one node."""
        return self.node_size_of(1)

    def node_size_of(self, num_nodes: int) -> int:
        """Return the GPUs of each node, if there are so many nodes."""
        return self.gpus_per_node or self.accelerator.node_size(num_nodes)


def cluster_named(
    name: str, *, total_bytes: int | None = None, num_nodes: int | None = None, gpus_per_node: int | None = None
) -> ClusterSpec:
    """Return the cluster that a name and the numbers asked for describe. `total_bytes` is the memory of one
    accelerator.

    Raises InvalidRequestError for an unknown name, a slice that is not offered, or numbers that contradict it.

    >>> slice = cluster_named("v5e:4x4")
    >>> slice.num_nodes, slice.gpus_per_node
    (4, 4)
    """
    if "," in name:
        parts = [part.strip() for part in name.split(",") if part.strip()] or [name]
        device = least_of([accelerator(part, total_bytes=total_bytes) for part in parts])
        base, count = name, None
    else:
        base, count = _split(name)
        device = accelerator(base, total_bytes=total_bytes)
    if count is None:
        return ClusterSpec(accelerator=device, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    whole = whole_cluster(device, count)
    nodes, size = whole.num_nodes, whole.gpus_per_node
    for option, asked, has in (("--nodes", num_nodes, nodes), ("--gpus-per-node", gpus_per_node, size)):
        if asked is not None and asked != has:
            raise InvalidRequestError(
                f"{name} is {nodes} node{'' if nodes == 1 else 's'} x {size} {device.unit}s, but {option} is {asked}; "
                "leave it out."
            )
    return whole


def accelerator_of(name: str) -> Mapping[str, Any]:
    """Return the catalogue's entry of the accelerator that a cluster's name holds. Raises InvalidRequestError.

    >>> accelerator_of("v5e:4x4")["name"]
    'v5e'
    """
    return accelerator_entry(_split(name)[0])


def whole_cluster(device: AcceleratorSpec, count: int) -> ClusterSpec:
    """Return so many accelerators as the machines of one engine.

    They are the chips of a TPU slice over its hosts, or the sockets of one host.
    """
    if device.kind == "cpu" or count <= device.gpus_per_node:
        return ClusterSpec(accelerator=device, num_nodes=1, gpus_per_node=count, is_whole=True)
    size = device.node_size(count)
    return ClusterSpec(accelerator=device, num_nodes=count // size, gpus_per_node=size, is_whole=True)


def part_of_node(cluster: ClusterSpec, engines: int, *, is_whole: bool = True) -> ClusterSpec:
    """Return the part of one node for each of several engines.

    The engines divide the node evenly. Each uses all of its part if `is_whole`.

    Engines on CPUs may be more than a node has sockets; then they divide the memory of a socket.
    Raises InvalidRequestError for machines that cannot be divided so.

    >>> part_of_node(ClusterSpec(accelerator=accelerator("h100-80gb")), 4).gpus_per_node
    2
    """
    device, size = cluster.accelerator, cluster.node_size
    if device.kind == "tpu":
        raise InvalidRequestError(f"{device.name}: the chips of a host serve one engine; use one replica in a job.")
    if device.kind == "cpu" and engines % size == 0:
        part = replace(device, total_bytes=device.total_bytes * size // engines)
        return ClusterSpec(accelerator=part, num_nodes=1, gpus_per_node=1, is_whole=True)
    if size % engines:
        parts = [str(count) for count in range(1, size + 1) if size % count == 0]
        raise InvalidRequestError(
            f"{engines} replicas cannot divide the {size} {device.unit}s of a node evenly: use {', '.join(parts)}, or "
            "say how many it has (--gpus-per-node)."
        )
    return replace(cluster, num_nodes=1, gpus_per_node=size // engines, is_whole=cluster.is_whole or is_whole)


def _split(name: str) -> tuple[str, int | None]:
    """Return (accelerator, its number). The number is None for a name without slice or sockets."""
    sockets = _SOCKETS.fullmatch(name)
    if sockets and accelerator_entry(sockets[1])["kind"] == "cpu":
        if not 1 <= int(sockets[2]) <= 8:
            raise InvalidRequestError(f"{name}: a node has 1 to 8 sockets.")
        return sockets[1], int(sockets[2])
    base, colon, topology = name.partition(":")
    if colon:
        known = accelerator(base, total_bytes=1).slices
        if not same_slice(topology, known):
            raise InvalidRequestError(f"{base} has no slice {topology!r}: use {', '.join(known) or 'no topology'}.")
        return base, chip_count(topology)
    numbered = _NUMBERED.fullmatch(name)
    if numbered and not is_accelerator(name) and is_accelerator(numbered[1]):
        return _numbered_slice(name, numbered[1], int(numbered[2]))
    return name, None


def _numbered_slice(name: str, base: str, number: int) -> tuple[str, int | None]:
    """Return a slice by Google's name for it: `v6e-8` has eight chips, `v5p-8` and `v4-8` have eight cores, two to a
    chip."""
    device = accelerator(base, total_bytes=1)
    chips = number // device.cores_in_slice_names
    if device.kind != "tpu" or slice_with(device, chips) is None or number % device.cores_in_slice_names:
        offered = [f"{base}-{device.cores_in_slice_names * chip_count(topology)}" for topology in device.slices]
        raise InvalidRequestError(f"{name} is not offered: use {', '.join(offered) or base}.")
    return base, chips
