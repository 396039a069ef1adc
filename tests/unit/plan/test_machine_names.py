"""Machines by the names that people give them: Google's names of slices, sides in any order, GPUs of several kinds."""

from __future__ import annotations

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import accelerator
from hpc_serve.plan.hardware.cluster import cluster_named
from hpc_serve.sizes import GIB
from tests.unit.plan.conftest import Plan


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
        ("h100-8", "h100-8 is not offered: use h100"),
        ("v6e:3x3", "2x4"),
        ("h100:2x2", "no topology"),
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
