"""One accelerator as the planner sees it: memory, bandwidth, FLOP/s and links of a GPU, a TPU chip or a CPU socket.

The facts come from the catalogue. TPU chips come in slices of given shapes. cluster.py describes the machines made of
accelerators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entry
from hpc_serve.sizes import GIB

USUAL_MATMUL_SHARE = 0.78
"""Share of its FLOP/s that a large matrix product reaches, where nobody measured it: the median of those measured."""
AcceleratorKind = Literal["gpu", "tpu", "cpu"]
LinkTopology = Literal["mesh", "pairs"]
_RATES = (
    *("label_bytes", "total_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"),
    *("gpus_per_node", "max_cuda_graph_batch", "matmul_share"),
)
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
    matmul_share: float = USUAL_MATMUL_SHARE
    link: str | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    gpus_per_node: int
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


def same_slice(topology: str, known: tuple[str, ...]) -> str | None:
    """Return the slice of that list with these sides in any order, or None.

    >>> same_slice("4x2", ("2x2", "2x4"))
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
