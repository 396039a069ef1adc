"""Accelerators and machines: what the catalogue holds, the names that people give them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import ClusterSpec, accelerator
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.units import GIB
from tests.unit.plan.conftest import Plan


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


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("v6e-8", "v6e:2x4"),
        ("v6e:4x2", "v6e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p:1x2x2", "v5p:2x2x1"),
        ("v4-16", "v4:2x2x2"),
    ],
)
def test_a_slice_has_several_names(name: str, same: str) -> None:
    assert cluster_named(name) == cluster_named(same)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v6e-7", "v6e-8"),
        ("v5p-4x4", "not an accelerator"),
        ("h100-80", "not an accelerator in the catalogue. Did you mean h100-80gb"),
        ("v6e:3x3", "2x4"),
        ("h100:2x2", "write h100 alone"),
    ],
)
def test_what_is_not_offered_is_told_with_what_is(name: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        cluster_named(name)


def test_new_names() -> None:
    assert accelerator("mi250").label_bytes == accelerator("mi250x").label_bytes
    assert accelerator("mi250").dense_flops["bf16"] < accelerator("mi250x").dense_flops["bf16"]
    assert cluster_named("cpu-milan-2s", total_bytes=256 * GIB).gpus_per_node == 2


def test_of_several_kinds_the_least_counts() -> None:
    a100, h100 = accelerator("a100-80gb"), accelerator("h100-pcie-80gb")
    mixed = cluster_named("a100-80gb,h100-pcie-80gb", num_nodes=1).accelerator
    assert mixed.total_bytes == min(a100.total_bytes, h100.total_bytes)
    assert mixed.bandwidth_bytes_per_s == min(a100.bandwidth_bytes_per_s or 0, h100.bandwidth_bytes_per_s or 0)
    assert mixed.dense_flops["bf16"] == a100.dense_flops["bf16"]
    assert "fp8" not in mixed.dense_flops
    assert cluster_named("h100,h100").accelerator.total_bytes == accelerator("h100").total_bytes
    for name in ("h100,mi300x", "v6e,v5e", "h100,cpu-spr"):
        with pytest.raises(InvalidRequestError):
            cluster_named(name, total_bytes=80 * GIB)


def test_a_plan_for_several_kinds(plan_json: Plan) -> None:
    kinds = "a100-80gb,h100-pcie-80gb"
    assert plan_json("70b", "--gpu", kinds, "--nodes", "1")["gpu"] == kinds
