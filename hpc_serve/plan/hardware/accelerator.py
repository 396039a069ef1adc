"""One accelerator as the planner sees it: memory, bandwidth, FLOP/s and links of a GPU, a TPU chip or a CPU socket.

The facts come from the catalogue. cluster.py describes the machines made of accelerators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import accelerator_entry
from hpc_serve.sizes import GIB

AcceleratorKind = Literal["gpu", "tpu", "cpu"]
LinkTopology = Literal["mesh", "pairs"]
_UNITS = {"gpu": "GPU", "tpu": "chip", "cpu": "socket"}


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
    link: str | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    gpus_per_node: int
    gpus_per_node_of_many: int | None = None
    slices: tuple[str, ...] = ()
    link_topology: LinkTopology | None = None
    default_max_num_batched_tokens: int | None = None
    has_small_batch_defaults: bool = False
    max_cuda_graph_batch: int = 512
    has_symmetric_memory: bool = False
    container_flag: str | None = None
    is_script_tested: bool = False
    no_script_reason: str | None = None
    note: str | None = None
    source: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What people call one of them: GPU, chip, socket."""
        return _UNITS[self.kind]

    def node_size(self, num_nodes: int) -> int:
        """How many each of so many nodes has. A single TPU host may have more chips than the hosts of a larger slice.

        Source: Google Cloud's TPU VM types; Ray has the same rule (_private/accelerators/tpu.py).
        """
        return self.gpus_per_node if num_nodes == 1 else self.gpus_per_node_of_many or self.gpus_per_node


def accelerator(name: str, *, total_bytes: int | None = None) -> AcceleratorSpec:
    """The accelerator of that name. `total_bytes` replaces the memory that its driver reports.

    Raises InvalidRequestError for an unknown name, and for a CPU without `total_bytes`: its product says no memory.
    """
    entry = accelerator_entry(name)
    seen = int(entry["total_gib"] * GIB) if entry["total_gib"] else None
    total = total_bytes or seen or entry["label_bytes"]
    if not total:
        raise InvalidRequestError(
            f"{entry['product']} has no memory of its own: say how much a socket has with --gpu-memory 256GiB."
        )
    facts = {name: entry[name] for name in AcceleratorSpec.__dataclass_fields__ if name in entry}
    facts |= {name: tuple(entry.get(name, ())) for name in ("slices", "source")}
    return AcceleratorSpec(**facts | {"label_bytes": entry["label_bytes"] or total, "total_bytes": total})
