"""Accelerators and clusters: what the catalogue holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import ClusterSpec, accelerator
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.sizes import GIB


def test_h100_has_less_than_its_label_times_gibibytes() -> None:
    gpu = accelerator("h100-80gb")
    assert gpu.label_bytes == 80_000_000_000
    assert gpu.total_bytes / GIB == pytest.approx(79.19)
    assert accelerator("h100") == accelerator("H100_80GB") == gpu


def test_memory_may_be_told() -> None:
    assert accelerator("h100-80gb", total_bytes=79 * GIB).total_bytes == 79 * GIB


def test_every_entry_is_complete() -> None:
    for name, entry in accelerator_entries().items():
        gpu = accelerator(name, total_bytes=256 * GIB if entry["kind"] == "cpu" else None)
        assert gpu.source, name
        assert gpu.bandwidth_bytes_per_s is None or gpu.bandwidth_bytes_per_s > 1e11, name
        assert gpu.gpus_per_node >= 1, name
        # "GB" on the label may mean 10**9 or 2**30 bytes
        assert entry["kind"] == "cpu" or 0.9 * gpu.label_bytes < gpu.total_bytes < 1.09 * gpu.label_bytes, name


def test_a_socket_has_no_memory_of_its_own() -> None:
    with pytest.raises(InvalidRequestError, match="--gpu-memory"):
        accelerator("cpu-spr")
    assert accelerator("cpu-spr", total_bytes=256 * GIB).kind == "cpu"


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(InvalidRequestError, match="h100"):
        accelerator("h1000")
    with pytest.raises(InvalidRequestError, match=r"Known: .*mi300x"):
        accelerator("abacus")


@pytest.mark.parametrize("field", ["num_nodes", "gpus_per_node"])
def test_a_cluster_has_something(field: str) -> None:
    none: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidRequestError, match=f"{field} is 0"):
        ClusterSpec(accelerator=accelerator("h100"), **none)


def test_nodes_have_the_usual_number_of_gpus() -> None:
    assert ClusterSpec(accelerator=accelerator("h100")).node_size == 8
    assert ClusterSpec(accelerator=accelerator("gb200")).node_size == 4
    assert ClusterSpec(accelerator=accelerator("h100"), gpus_per_node=4).node_size == 4
