"""Memory per GPU: laws that hold for every model and layout, and vLLM's own arithmetic where it is exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.accuracy import DATA
from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import ClusterSpec, EngineConfig, MemoryEstimate, Workload, accelerator, model_from_config, plan
from hpc_serve.plan.choice.planner import NoLayoutError
from hpc_serve.plan.engine import batches_in_flight
from hpc_serve.plan.memory.kv_cache import cache_layout, full_context_bytes
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.units import GIB
from tests.support.plans import changed, estimate, spec

ENGINES = json.loads((DATA / "vllm_engine_runs.json").read_text())
MODELS = ("8b", "70b", "405b", "qwen3-235b", "r1", "gemma-3-27b", "gpt-oss-120b", "Qwen/Qwen3-Next-80B-A3B-Instruct")
quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


models = st.sampled_from(MODELS)
widths = st.sampled_from([1, 2, 4])
lengths = st.integers(min_value=64, max_value=32768)


@quick
@given(models, widths, lengths, lengths)
def test_a_request_grows_with_its_context(name: str, tp: int, first: int, second: int) -> None:
    short, long = sorted((first, second))
    here, there = estimate(name, tp=tp, pp=4, length=short), estimate(name, tp=tp, pp=4, length=long)
    assert here.blocks_per_request <= there.blocks_per_request
    assert full_context_bytes(spec(name), EngineConfig(), short) <= full_context_bytes(spec(name), EngineConfig(), long)


@quick
@given(models, widths, st.integers(256, 16384), st.integers(256, 16384))
def test_activations_grow_with_the_batch(name: str, tp: int, first: int, second: int) -> None:
    small, large = sorted((first, second))
    here = estimate(name, tp=tp, pp=4, max_num_batched_tokens=small)
    there = estimate(name, tp=tp, pp=4, max_num_batched_tokens=large)
    assert here.activation_bytes <= there.activation_bytes
    assert here.kv_cache_bytes >= there.kv_cache_bytes


@quick
@given(models, widths, st.integers(1, 4), lengths, st.floats(0.3, 1.0))
def test_the_cache_never_exceeds_what_is_left(name: str, tp: int, pp: int, length: int, share: float) -> None:
    found = estimate(name, tp=tp, pp=pp, length=length, gpu_memory_utilization=share)
    assert found.num_blocks * found.bytes_per_block <= max(0, found.kv_cache_bytes)
    assert found.num_blocks == max(0, found.kv_cache_bytes) // found.bytes_per_block
    if name in ("8b", "70b", "405b", "qwen3-235b", "r1"):  # each block holds keys and values of every layer
        assert found.kv_cache_tokens * found.kv_bytes_per_token <= max(0, found.kv_cache_bytes) + found.bytes_per_block
    parts = found.model_loading_bytes + found.activation_bytes + found.cuda_graph_bytes + found.non_torch_bytes
    assert parts + found.kv_cache_bytes == found.requested_bytes


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    models,
    st.sampled_from(["h100-80gb", "a100-80gb", "mi300x", "l40s", "b200"]),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([2, 4, 8]),
    lengths,
    st.integers(1, 8),
)
def test_a_plan_passes_its_own_check(name, gpu, nodes, size, length, concurrency):
    cluster = ClusterSpec(accelerator=accelerator(gpu), num_nodes=nodes, gpus_per_node=size)
    workload = Workload(max_model_len=length, concurrency=concurrency)
    try:
        found = plan(spec(name), cluster, EngineConfig(), workload)
    except NoLayoutError:
        return
    assert found.layout.num_gpus == found.layout.num_nodes * found.layout.gpus_per_node
    assert found.layout.gpus_per_node <= size
    assert nodes in (None, found.layout.num_nodes)
    tp, pp = found.layout.tensor_parallel_size, found.layout.pipeline_parallel_size
    again = estimate(name, gpu, tp=tp, pp=pp, length=length, max_num_seqs=found.memory.max_num_seqs)
    assert again == found.memory
    assert again.holds(concurrency)
    asked = EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert plan(spec(name), cluster, asked, workload).memory == found.memory


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [
        ("70b", 128_000, 39.06),
        ("70b", 131_072, 40.0),
        ("405b", 128_000, 61.52),
        ("405b-first-release", 128_000, 123.05),
    ],
)
def test_cache_of_one_request(name: str, tokens: int, gib: float) -> None:
    """The first and the last as huggingface.co/blog/llama31 has them."""
    assert round(full_context_bytes(spec(name), EngineConfig(), tokens) / GIB, 2) == gib


def test_int8_cache_of_70b() -> None:
    """160 KiB a token, 5.37 GB at 32,768 (jax-ml.github.io/scaling-book/applied-inference prints 5.3)."""
    engine = EngineConfig(kv_cache_dtype="int8")
    assert full_context_bytes(spec("70b"), engine, 1) == 160 * 1024
    assert full_context_bytes(spec("70b"), engine, 32_768) == 5_368_709_120


def test_latent_cache_is_on_every_rank() -> None:
    """61 layers of 576 elements; vLLM printed for Kimi K2 on eight H200 46.80 GiB / 715,072 tokens = 70,275 bytes."""
    for tp in (1, 8):
        assert estimate("r1", tp=tp).kv_bytes_per_token == 61 * 576 * 2


def test_windows_are_groups_of_their_own() -> None:
    model = spec("gemma-3-27b")
    layout = cache_layout(model, EngineConfig(), 1)
    kinds = [(group.kind, len(group.layers)) for group in layout.groups]
    assert kinds == [("sliding", 9)] * 4 + [("sliding", 8)] * 2 + [("full", 10)]
    whole = cache_layout(model, EngineConfig(vllm_version="0.8.5"), 1)
    assert [(group.kind, len(group.layers)) for group in whole.groups] == [("full", 62)]


def on_cpu(model: Any, **options: Any) -> MemoryEstimate:
    sizes = {"length": ENGINES["max_model_len"], "kv_cache_memory_bytes": ENGINES["kv_cache_memory_bytes"]}
    return estimate(model, accelerator("cpu-spr", total_bytes=24 * GIB), **sizes, **options)


@pytest.mark.parametrize("run", ENGINES["runs"], ids=lambda run: f"{run['model']}-tp{run['tp']}-pp{run['pp']}")
def test_what_real_engines_on_cpu_held_and_printed(run: dict[str, Any]) -> None:
    """Windows, states, latent caches, experts; tests/e2e/test_plan_measured.py starts such engines."""
    model = model_from_config(ENGINES["configs"][run["model"]], name=run["model"])
    tokens = 4096 * run["tp"] * run["pp"]  # the default of vLLM's LLM class on CPUs
    found = on_cpu(model, tp=run["tp"], pp=run["pp"], max_num_batched_tokens=tokens)
    ranks = [stage.weight_bytes for stage in pipeline_stages(model, run["tp"], run["pp"]) for _ in range(run["tp"])]
    assert ranks == run["weight_bytes"]
    assert found.kv_cache_tokens == run["kv_cache_tokens"]
    assert round(found.max_concurrency, 2) == run["max_concurrency"]


def test_one_block_is_vllms_own() -> None:
    exactly = estimate("8b", length=1024, kv_cache_memory_bytes=64 * 16 * 131_072)
    assert exactly.num_blocks == exactly.blocks_per_request == 64
    assert not exactly.holds(1)
    assert estimate("8b", length=1024, kv_cache_memory_bytes=65 * 16 * 131_072).holds(1)


def test_a_step_holds_a_token_of_each_sequence() -> None:
    with pytest.raises(DoesNotFitError, match="is less than --max-num-seqs 256"):
        estimate("8b", max_num_batched_tokens=64, max_num_seqs=256)
    assert estimate("8b", max_num_batched_tokens=64).max_num_seqs == 64


def test_a_cache_of_that_size_must_fit_beside_the_weights() -> None:
    found = estimate("70b", tp=4, kv_cache_memory_bytes=30 * GIB)
    parts = found.model_loading_bytes + found.activation_bytes + found.cuda_graph_bytes + found.non_torch_bytes
    assert parts + 30 * GIB == found.requested_bytes <= found.total_bytes
    assert not estimate("70b", tp=2, kv_cache_memory_bytes=30 * GIB).holds(1)
    one = ClusterSpec(accelerator=accelerator("l4"), num_nodes=1, gpus_per_node=1)
    with pytest.raises(NoLayoutError, match=r"30\.\d GiB per GPU with --kv-cache-memory-bytes, 22.0 usable"):
        plan(spec("Qwen/Qwen3-0.6B"), one, EngineConfig(kv_cache_memory_bytes=28 * GIB))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size"),
        ({"vllm_version": "newest"}, "vllm_version"),
        ({"length": 131_073}, "131072 positions"),
        ({"kv_cache_dtype": "fp3"}, "'fp3'"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        estimate("8b", **options)


def test_cache_type_of_the_checkpoint_is_taken() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    model = changed("8b", quantization_config=scheme)
    assert full_context_bytes(model, EngineConfig(), 1) == 65_536
    assert full_context_bytes(model, EngineConfig(kv_cache_dtype="bfloat16"), 1) == 131_072


@pytest.mark.parametrize(
    ("version", "share", "graphs_outside", "by_blocks"),
    [("0.19.0", 0.9, True, True), ("0.20.0", 0.92, False, True), ("0.21.0", 0.92, False, False)],
)
def test_when_vllm_began_to_count_graphs_and_to_print_tokens_of_requests(version, share, graphs_outside, by_blocks):
    """Read in the wheels of these versions: envs.py, config/cache.py and v1/core/kv_cache_utils.py."""
    found = estimate("gemma-3-27b", vllm_version=version)
    assert found.requested_bytes == pytest.approx(share * found.total_bytes, abs=1)
    assert found.graphs_outside == graphs_outside
    groups = 7  # of Gemma 3 27B: 52 layers with windows and 10 without
    assert (found.kv_cache_tokens == found.num_blocks // groups * 16) == by_blocks


@pytest.mark.parametrize(
    ("batches", "kind", "stages", "options"),
    [
        (2, "gpu", 1, {}),
        (3, "gpu", 2, {}),
        (1, "cpu", 1, {}),
        (1, "gpu", 1, {"async_scheduling": False}),
        (1, "gpu", 1, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        (2, "gpu", 1, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
        (1, "gpu", 1, {"runner": "pooling"}),
        (1, "gpu", 1, {"vllm_version": "0.23.0"}),
        (1, "gpu", 2, {"vllm_version": "0.25.0"}),
        (2, "gpu", 2, {"vllm_version": "0.26.0"}),
    ],
)
def test_batches_in_flight(batches: int, kind: Any, stages: int, options: dict[str, Any]) -> None:
    assert batches_in_flight(EngineConfig(**options), kind, stages) == batches


def test_an_engine_on_cpus_keeps_one_batch_beside_a_window() -> None:
    """A real engine of 0.32 with steps of 2,048 tokens printed 40,800 tokens, and 10.20 requests of 4,000."""
    model = model_from_config(ENGINES["configs"]["mistral"], name="mistral")
    found = on_cpu(model, max_num_batched_tokens=2048)
    assert (found.kv_cache_tokens, round(found.max_concurrency, 2)) == (40_800, 10.20)
