"""One accelerator as the planner sees it: memory, bandwidth, FLOP/s and links of a GPU, a TPU chip or a CPU socket.

The facts are the catalogue's; the machines made of accelerators are in cluster.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entry
from hpc_serve.sizes import GIB

AcceleratorKind = Literal["gpu", "tpu", "cpu"]
_UNITS = {"gpu": "GPU", "tpu": "chip", "cpu": "socket"}


@dataclass(frozen=True, kw_only=True)
class AcceleratorSpec:
    """One GPU (or TPU chip, or CPU socket).

    `label_bytes` is the product's label (80 GB = 80e9), `total_bytes` what the driver reports to torch; where that was
    never seen it is the label. Bandwidth and links in bytes per second, one direction; `dense_flops` by type, without
    sparsity, in operations per second. None: not confirmed by any source.
    """

    name: str
    product: str
    vendor: str
    kind: AcceleratorKind
    label_bytes: int
    total_bytes: int
    bandwidth_bytes_per_s: float | None
    dense_flops: Mapping[str, float] = field(hash=False)
    link: str | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    gpus_per_node: int
    note: str | None = None
    source: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What people call one of them: GPU, chip, socket."""
        return _UNITS[self.kind]

    @property
    def gpus_per_host_of_many(self) -> int:
        """How many a node of several has: hosts of TPU slices that span hosts have four chips, whatever a single has.

        Source: Google Cloud's TPU VM types; the same rule is in Ray (_private/accelerators/tpu.py).
        """
        return min(4, self.gpus_per_node) if self.kind == "tpu" else self.gpus_per_node


def accelerator(name: str, *, total_bytes: int | None = None) -> AcceleratorSpec:
    """The accelerator of that name; `total_bytes` overrides the memory its driver reports.

    Raises InvalidRequestError for an unknown name, or for one whose memory is not a fact of the product (CPUs).
    """
    entry = accelerator_entry(name)
    seen = int(entry["total_gib"] * GIB) if entry["total_gib"] else None
    total = total_bytes or seen or entry["label_bytes"]
    if not total:
        raise InvalidRequestError(
            f"{entry['product']} has no memory of its own: say how much a socket has with --gpu-memory 256GiB."
        )
    return AcceleratorSpec(
        name=entry["name"],
        product=entry["product"],
        vendor=entry["vendor"],
        kind=entry["kind"],
        label_bytes=entry["label_bytes"] or total,
        total_bytes=total,
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        dense_flops=entry["dense_flops"],
        link=entry["link"],
        link_bytes_per_s=entry["link_bytes_per_s"],
        network_bytes_per_s=entry["network_bytes_per_s"],
        gpus_per_node=entry["gpus_per_node"],
        note=entry["note"],
        source=tuple(entry["source"]),
    )
