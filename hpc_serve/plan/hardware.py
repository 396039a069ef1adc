"""The machines to plan for: one accelerator, the nodes made of it, and the names that people give both.

An accelerator is a GPU, a TPU chip or a CPU socket, with its memory, bandwidth, FLOP/s and links. The facts come from
the catalogue. Names are those of a GPU (`h100`), of a TPU slice (`v5e:4x4`, `v5e-16`), of the sockets of a CPU node
(`cpu-spr-2s`), and of GPUs of several kinds (`a100-80gb,h100-pcie-80gb`).

One engine uses a slice, or a node named with its sockets, as a whole. On other nodes an engine uses only the
accelerators that it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entry, is_accelerator
from hpc_serve.units import GIB, at_least_one

DEFAULT_GPU = "h100-80gb"
"""The GPU that is planned for where nobody names one."""
_USUAL_MATMUL_SHARE = 0.78
"""Share of its FLOP/s that a large matrix product reaches, where nobody measured it: the median of those measured."""
AcceleratorKind = Literal["gpu", "tpu", "cpu"]
LinkTopology = Literal["mesh", "pairs"]
_RATES = (
    *("label_bytes", "total_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"),
    *("gpus_per_node", "max_cuda_graph_batch", "matmul_share", "compute_capability"),
)
_NUMBERED = re.compile(r"(.+)-(\d+)")
_SOCKETS = re.compile(r"(.+?)[-:](\d+)s")
_UNITS = {"gpu": "GPU", "tpu": "chip", "cpu": "socket"}


@dataclass(frozen=True, kw_only=True)
class ListPrice:
    """The price of one accelerator for an hour, with its date (YYYY-MM-DD) and its source."""

    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """One GPU (or TPU chip, or CPU socket).

    `label_bytes` is the product's label (80 GB = 80e9). `total_bytes` is what the driver reports to torch, or the label
    where nobody has seen that. Bandwidth and links are in bytes per second, one direction. `dense_flops` are operations
    per second by type, without sparsity. None: no source confirms it. The catalogue's accelerators.json says what the
    other fields mean.
    """

    name: str
    product: str
    vendor: str
    kind: AcceleratorKind
    label_bytes: int
    total_bytes: int
    bandwidth_bytes_per_s: float | None
    dense_flops: Mapping[str, float] = field(hash=False)
    matmul_share: float = _USUAL_MATMUL_SHARE
    link: str | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    gpus_per_node: int
    compute_capability: float | None = None
    gpus_per_node_of_many: int | None = None
    slices: tuple[str, ...] = ()
    link_topology: LinkTopology | None = None
    cores_in_slice_names: int = 1
    default_max_num_batched_tokens: int | None = None
    has_small_batch_defaults: bool = False
    max_cuda_graph_batch: int = 512
    has_symmetric_memory: bool = False
    container_flag: str | None = None
    is_script_tested: bool = False
    no_script_reason: str | None = None
    list_price: ListPrice | None = None
    note: str | None = None
    source: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The word for one accelerator: GPU, chip, socket."""
        return _UNITS[self.kind]

    def has_custom_all_reduce(self, ranks: int) -> bool:
        """Return whether vLLM's own all-reduce runs among so many in a node.

        It does not run over PCIe. Over bridges it runs between two alone.

        Source: `CustomAllreduce` in vLLM's distributed/device_communicators.
        """
        over_pcie = (self.link or "PCIe").startswith("PCIe")
        return not over_pcie and (self.link_topology != "pairs" or ranks == 2)

    def node_size(self, num_nodes: int) -> int:
        """Return how many each of so many nodes has. A single TPU host may have more chips than the hosts of a larger
        slice.

        Source: Google Cloud's TPU VM types; Ray has the same rule (_private/accelerators/tpu.py).
        """
        return self.gpus_per_node if num_nodes == 1 else self.gpus_per_node_of_many or self.gpus_per_node


def accelerator(name: str, *, total_bytes: int | None = None) -> AcceleratorSpec:
    """Return the accelerator of that name. `total_bytes` replaces the memory that its driver reports.

    Raises InvalidRequestError for an unknown name, and for a CPU without `total_bytes`: its product says no memory.
    """
    entry = accelerator_entry(name)
    seen = int(entry["total_gib"] * GIB) if entry["total_gib"] else None
    total = total_bytes or seen or entry["label_bytes"]
    if not total:
        raise InvalidRequestError(
            f"{entry['product']} has no fixed amount of memory: give the memory of a socket with --gpu-memory 256GiB."
        )
    facts = {name: entry[name] for name in AcceleratorSpec.__dataclass_fields__ if name in entry}
    facts |= {name: tuple(entry.get(name, ())) for name in ("slices", "source")}
    if entry.get("list_price"):
        facts["list_price"] = ListPrice(**entry["list_price"])
    return AcceleratorSpec(**facts | {"label_bytes": entry["label_bytes"] or total, "total_bytes": total})


def least_of(devices: Sequence[AcceleratorSpec]) -> AcceleratorSpec:
    """Return the accelerator that one engine can count on if its GPUs are of several kinds.

    Each figure is the least of the kinds.

    Ranks have equal shares and wait for each other, so the smallest memory and the slowest rate decide. Raises
    InvalidRequestError for other accelerators than GPUs, and for GPUs of several vendors.
    """
    first = devices[0]
    if any(device.kind != "gpu" or device.vendor != first.vendor for device in devices):
        raise InvalidRequestError(
            "Only GPUs of one vendor can be one engine's: name one accelerator, or --compare them."
        )

    def least(name: str) -> Any:
        values = [getattr(device, name) for device in devices]
        return None if None in values else min(values)

    types = set.intersection(*(set(device.dense_flops) for device in devices))
    return replace(
        first,
        name=",".join(device.name for device in devices),
        product=" and ".join(device.product for device in devices),
        dense_flops={type_: min(device.dense_flops[type_] for device in devices) for type_ in sorted(types)},
        link_topology=next((device.link_topology for device in devices if device.link_topology), None),
        has_small_batch_defaults=any(device.has_small_batch_defaults for device in devices),
        has_symmetric_memory=all(device.has_symmetric_memory for device in devices),
        is_script_tested=False,
        list_price=None,
        **{name: least(name) for name in _RATES},
    )


def chip_count(topology: str) -> int:
    """Return the chips of a slice.

    >>> chip_count("4x4")
    16
    """
    return math.prod(int(side) for side in topology.split("x"))


def _same_slice(topology: str, known: tuple[str, ...]) -> str | None:
    """Return the slice of that list with these sides in any order, or None.

    >>> _same_slice("4x2", ("2x2", "2x4"))
    '2x4'
    """
    return next((name for name in known if sorted(name.split("x")) == sorted(topology.split("x"))), None)


def split_axes(topology: str) -> int:
    """Return how many sides of a slice have more than one chip. A model can be split along these."""
    return sum(int(side) > 1 for side in topology.split("x"))


def slice_with(accelerator: AcceleratorSpec, count: int) -> str | None:
    """Return the topology with exactly so many chips, or None."""
    return next((name for name in accelerator.slices if chip_count(name) == count), None)


def is_offered(accelerator: AcceleratorSpec, count: int) -> bool:
    """Return whether so many make one machine. GPUs come in any number, TPU chips in the numbers of slices."""
    return accelerator.kind != "tpu" or slice_with(accelerator, count) is not None


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
        if not _same_slice(topology, known):
            raise InvalidRequestError(f"{base} has no slice {topology!r}: write {', '.join(known) or f'{base} alone'}.")
        return base, chip_count(topology)
    numbered = _NUMBERED.fullmatch(name)
    if numbered and not is_accelerator(name) and _is_tpu(numbered[1]):
        return _numbered_slice(name, numbered[1], int(numbered[2]))
    return name, None


def _is_tpu(name: str) -> bool:
    return is_accelerator(name) and accelerator_entry(name)["kind"] == "tpu"


def _numbered_slice(name: str, base: str, number: int) -> tuple[str, int | None]:
    """Return a slice by Google's name for it: `v6e-8` has eight chips, `v5p-8` and `v4-8` have eight cores, two to a
    chip."""
    device = accelerator(base, total_bytes=1)
    chips = number // device.cores_in_slice_names
    if slice_with(device, chips) is None or number % device.cores_in_slice_names:
        offered = [f"{base}-{device.cores_in_slice_names * chip_count(topology)}" for topology in device.slices]
        raise InvalidRequestError(f"{name} is not offered: use {', '.join(offered)}.")
    return base, chips
