"""What a rank takes beside weights and cache: activations of texts and images, CUDA graphs, memory of the driver."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.plan import EngineConfig, MemoryEstimate
from hpc_serve.plan.memory.overhead import graph_mode
from hpc_serve.units import GIB
from tests.support.configs import built
from tests.support.plans import estimate, spec


def test_eager_has_no_graphs_and_older_versions_do_not_count_them() -> None:
    assert estimate("8b", enforce_eager=True).cuda_graph_bytes == 0
    older = estimate("8b", vllm_version="0.11.0")
    assert older.graphs_outside
    assert older.cuda_graph_bytes > 0
    assert older.kv_cache_bytes + older.model_loading_bytes + older.activation_bytes + older.non_torch_bytes == (
        older.requested_bytes
    )


def test_images_count_in_the_activation_peak() -> None:
    """On one GPU the tower's pass over the largest images is the peak; on later stages nothing of it is left."""
    text, images = estimate("Qwen/Qwen3.5-27B", max_num_seqs=16), spec("Qwen/Qwen3.5-27B").images
    assert images is not None
    outputs = 16384 * 5120 * 2
    tower = 16384 * 4 * 15 * 1152 * 2
    assert text.activation_bytes == outputs + tower
    assert estimate("Qwen/Qwen3-Next-80B-A3B-Instruct", max_num_seqs=16).activation_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("gpu", "tp", "version", "gib"),
    [
        ("h100-80gb", 1, "0.32.0", 0.25),
        ("h100-80gb", 4, "0.32.0", 2.10),
        ("rtx-5090", 2, "0.32.0", 0.26),
        ("l40s", 8, "0.10.0", 0.20),
        ("h100-94gb", 2, "0.11.0", 0.40),
        ("h100-94gb", 4, "0.11.0", 0.16),
        ("h100-80gb", 4, "0.11.0", 0.94),
        ("v5e", 4, "0.32.0", 0),
    ],
)
def test_memory_torch_does_not_see(gpu: str, tp: int, version: str, gib: float) -> None:
    found = estimate("8b", tp=tp, gpu=gpu, vllm_version=version)
    assert found.non_torch_bytes / GIB == pytest.approx(gib, abs=0.01)


def profiled(name: str, gpu: str, tp: int, length: int, **options: Any) -> MemoryEstimate:
    return estimate(built(name), gpu, tp=tp, length=length, **options)


def test_the_largest_video_is_profiled() -> None:
    """A public log of 0.22 or 0.23 on an A100 of 80 GB: weights 15.67 GiB, a video of 114,688 tokens, graphs 0.53,
    -14.28 GiB left of 17.43 for the cache."""
    options = {"vllm_version": "0.23.0", "gpu_memory_utilization": 0.22}
    found = profiled("qwen2.5-vl-7b", "a100-80gb", 1, 128000, **options)
    assert (found.requested_bytes - found.kv_cache_bytes) / GIB == pytest.approx(17.43 + 14.28, rel=0.07)
    short = profiled("qwen2.5-vl-7b", "a100-80gb", 1, 20000, **options)
    images = profiled("qwen2.5-vl-7b", "a100-80gb", 1, 128000, limit_mm_per_prompt={"video": 0}, **options)
    assert short.activation_bytes == images.activation_bytes < found.activation_bytes / 6


def test_vllm_0_11_kept_many_tokens_for_a_video() -> None:
    """A public log of 0.11.0 on four RTX 3090: a budget of 153,600 tokens, 2.31 GiB left for the cache."""
    found = profiled("qwen3-vl-30b", "rtx-3090", 4, 65536, vllm_version="0.11.0")
    assert found.kv_cache_bytes / GIB == pytest.approx(2.31, rel=0.15)
    later = profiled("qwen3-vl-30b", "rtx-3090", 4, 65536, vllm_version="0.13.0")
    assert later.activation_bytes < found.activation_bytes / 2


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("FULL_AND_PIECEWISE", {}),
        ("NONE", {"enforce_eager": True}),
        ("NONE", {"optimization_level": "0"}),
        ("PIECEWISE", {"optimization_level": "1"}),
        ("PIECEWISE", {"runner": "pooling"}),
        ("FULL_DECODE_ONLY", {"compilation_config": {"mode": 0}}),
        ("NONE", {"compilation_config": {"mode": "none", "cudagraph_mode": "piecewise"}}),
        ("FULL", {"compilation_config": {"cudagraph_mode": "full"}, "optimization_level": "0"}),
    ],
)
def test_which_graphs_there_are(mode: str, options: dict[str, Any]) -> None:
    assert graph_mode(EngineConfig(**options)) == mode


def test_graphs_take_what_their_sizes_say() -> None:
    every = estimate("8b").cuda_graph_bytes
    pieces = estimate("8b", compilation_config={"cudagraph_mode": "PIECEWISE"}).cuda_graph_bytes
    decoding = estimate("8b", compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}).cuda_graph_bytes
    assert pieces + decoding == every
    few = estimate("8b", compilation_config={"cudagraph_capture_sizes": [1, 8, 64]}).cuda_graph_bytes
    assert few == every * 6 // 102
    hybrid = "Qwen/Qwen3.5-27B"
    assert estimate(hybrid).least_blocks == 1024
    assert estimate(hybrid, compilation_config={"cudagraph_mode": "PIECEWISE"}).least_blocks == 0
