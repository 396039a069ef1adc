"""Accelerators and machines: the catalogue, the names that people give, and that a new accelerator is one entry."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import ClusterSpec, EngineConfig, ServePlan, accelerator, plan
from hpc_serve.plan.catalog import accelerator_entries
from hpc_serve.plan.engine import max_num_batched_tokens
from hpc_serve.plan.hardware import AcceleratorSpec, cluster_named
from hpc_serve.plan.memory.estimate import profile_runs
from hpc_serve.plan.memory.overhead import graph_count, nccl_bytes
from hpc_serve.plan.speed.step import ASSUMED_LINK_BYTES_PER_S, link_rate
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.script.render import render_script
from hpc_serve.units import GIB
from tests.support.plans import layout, spec


def test_h100_has_less_than_its_label_times_gibibytes() -> None:
    gpu = accelerator("h100-80gb")
    assert gpu.label_bytes == 80_000_000_000
    assert gpu.total_bytes / GIB == pytest.approx(79.19)
    assert accelerator("h100") == accelerator("H100_80GB") == gpu
    assert accelerator("h100-80gb", total_bytes=79 * GIB).total_bytes == 79 * GIB


def test_every_entry_is_complete() -> None:
    for name, entry in accelerator_entries().items():
        gpu = accelerator(name, total_bytes=256 * GIB if entry["kind"] == "cpu" else None)
        assert gpu.source, name
        assert gpu.bandwidth_bytes_per_s is None or gpu.bandwidth_bytes_per_s > 1e11, name
        assert gpu.gpus_per_node >= 1, name
        # "GB" on the label may mean 10**9 or 2**30 bytes
        assert entry["kind"] == "cpu" or 0.9 * gpu.label_bytes < gpu.total_bytes < 1.09 * gpu.label_bytes, name


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
        ("h1000", "Did you mean h100"),
        ("abacus", "Known: .*mi300x"),
        ("cpu-spr", "no fixed amount of memory.*--gpu-memory"),
    ],
)
def test_what_is_not_offered_is_told_with_what_is(name: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        cluster_named(name)


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


def test_a_plan_for_several_kinds(plan_json) -> None:
    kinds = "a100-80gb,h100-pcie-80gb"
    assert plan_json("70b", "--gpu", kinds, "--nodes", "1")["gpu"] == kinds


# -- a new entry is planned for, and has scripts, without a change of code

MODEL = spec("8b")
GPU: dict[str, Any] = {"name": "x900", "aliases": [], "product": "X900", "vendor": "Newcomer", "kind": "gpu"}
GPU |= {"label_bytes": 100_000_000_000, "total_gib": 93.0, "bandwidth_bytes_per_s": 5e12, "dense_flops": {"bf16": 1e15}}
GPU |= {"link": "XLink", "link_bytes_per_s": 4e11, "gpus_per_node": 8, "network_bytes_per_s": 5e10}
GPU |= {"confidence": "none", "note": "made up", "source": ["DERIVED"]}


def add(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    """Put an entry into the catalogue for the length of a test; returns its name."""
    entry = {**GPU, **fields}
    monkeypatch.setitem(accelerator_entries(), entry["name"], entry)
    return str(entry["name"])


def plan_on(gpu: str, total_bytes: int | None = None) -> ServePlan:
    return plan(MODEL, cluster_named(gpu, total_bytes=total_bytes))


def script_for(gpu: str, **options: Any) -> str:
    request = ServeRequest(model="8b", service="8b", gpu=gpu, **options)
    return render_script(request, plan_on(gpu, options.get("gpu_memory_bytes")))


def test_an_entry_without_optional_fields_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    name = add(monkeypatch)
    found = plan_on(name)
    assert (found.layout.num_gpus, found.accelerator.product) == (1, "X900")
    assert "have no Newcomer GPU" in script_for(name)


def test_a_slice_and_its_hosts_are_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = {"slices": ["1x1", "2x4", "4x4"], "gpus_per_node_of_many": 4}
    name = add(monkeypatch, name="t9", kind="tpu", **slices, default_max_num_batched_tokens=768)
    assert (cluster_named(f"{name}:2x4").num_nodes, cluster_named(f"{name}:4x4").num_nodes) == (1, 4)
    assert plan_on(f"{name}:4x4").layout.num_gpus == 16
    assert max_num_batched_tokens(EngineConfig(), accelerator(name), 8192) == 768
    with pytest.raises(InvalidRequestError, match="write 1x1, 2x4, 4x4"):
        cluster_named(f"{name}:3x3")


def test_a_cpu_node_is_named_by_its_sockets_whatever_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name = add(monkeypatch, name="risc-9", kind="cpu", total_gib=None, label_bytes=None, gpus_per_node=2)
    assert plan_on(f"{name}-2s", 64 * GIB).layout.num_gpus == 2
    assert cluster_named(f"{name}:1s", total_bytes=64 * GIB).gpus_per_node == 1


def test_what_vllm_chooses_by_the_device_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, named = add(monkeypatch), add(monkeypatch, name="x901", has_small_batch_defaults=True)
    larger = add(monkeypatch, name="x902", max_cuda_graph_batch=1024, has_symmetric_memory=True)
    engine = EngineConfig()
    assert max_num_batched_tokens(engine, accelerator(plain), 8192) == 8192
    assert max_num_batched_tokens(engine, accelerator(named), 8192) == 2048

    def run(name: str) -> Any:
        return profile_runs(MODEL, accelerator(name), engine, (8, 1, 1), 8192)[0]

    assert graph_count(run(larger)) > graph_count(run(plain))
    assert nccl_bytes(run(larger)) != nccl_bytes(run(plain))


def test_what_links_join_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(name: str, ranks: int) -> float:
        return link_rate(accelerator(name), layout(ranks))

    switch, mesh = add(monkeypatch), add(monkeypatch, name="x901", link_topology="mesh")
    pairs = add(monkeypatch, name="x902", link_topology="pairs")
    assert rate(switch, 2) == 4e11
    assert rate(mesh, 2) == pytest.approx(4e11 / 7)
    assert (rate(pairs, 2), rate(pairs, 4)) == (4e11, ASSUMED_LINK_BYTES_PER_S)


def test_what_a_script_needs_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    name = add(monkeypatch, container_flag="--newcomer", is_script_tested=True)
    container = Environment(kind="apptainer", path="/images/vllm.sif")
    script = script_for(name, environment=container)
    assert "apptainer exec --newcomer" in script
    assert "not run here" not in script
    refused = add(monkeypatch, name="x901", no_script_reason="its vLLM is a plugin")
    with pytest.raises(InvalidRequestError, match="no script for it: its vLLM is a plugin"):
        script_for(refused)


def test_entries_have_no_field_that_nobody_reads() -> None:
    known = {*AcceleratorSpec.__dataclass_fields__, "aliases", "total_gib", "confidence"}
    for name, entry in accelerator_entries().items():
        assert set(entry) <= known, name
