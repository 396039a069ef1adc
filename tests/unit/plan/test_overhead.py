"""What a rank takes beside weights and cache: activations, CUDA graphs, memory of the driver, and what ROCm adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.plan import EngineConfig, MemoryEstimate, accelerator
from hpc_serve.plan.memory import overhead
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.units import GIB
from tests.support.configs import built, config_of
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
    assert overhead.graph_mode(EngineConfig(**options)) == mode


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


# -- ROCm: padded rows, the runtime, RCCL

DENSE, EXPERTS = "meta-llama/Llama-3.1-405B-Instruct", "Qwen/Qwen3-30B-A3B"


def model(name: str, quantization: dict[str, Any] | None = None, override: str | None = None) -> ModelSpec:
    changes = {"quantization_config": quantization} if quantization else {}
    return built(config_of(name, **changes), quantization=override)


def padding(spec: ModelSpec, gpu: str = "mi300x", ranks: int = 8, expert_ranks: int = 1) -> int:
    return overhead.row_padding_bytes(spec, spec.layers, accelerator(gpu), ranks, expert_ranks)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_row_of_fp8_per_tensor_is_padded(ranks: int) -> None:
    """The rows of 126 layers: q, k and v and gate and up are divided, the outputs of attention and MLP are not."""
    rows = (16384 + 2 * 8 * 128) // ranks + 16384 + 2 * 53248 // ranks + 16384
    fp8 = model(DENSE, {"quant_method": "fp8", "activation_scheme": "static"})
    assert padding(fp8, ranks=ranks) == 126 * rows * overhead.ROW_PADDING_BYTES


@pytest.mark.parametrize(
    ("quantization", "override"),
    [
        (None, None),
        ({"quant_method": "fbgemm_fp8"}, None),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, None),
        (None, "fp8"),
    ],
)
def test_what_vllm_does_not_pad(quantization: dict[str, Any] | None, override: str | None) -> None:
    """Dense matrices in 16 bit, scales for each row, Quark's, and what vLLM quantises itself."""
    assert padding(model(DENSE, quantization, override)) == 0


def test_blocks_are_padded_and_nothing_is_on_cuda() -> None:
    blocks = model(DENSE, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert padding(blocks) > GIB
    assert padding(blocks, gpu="h200-141gb") == 0


def test_experts_in_16_bit_are_padded_where_their_rows_are_multiples_of_512_bytes() -> None:
    """Qwen3-30B-A3B has 48 layers of 128 experts of 768 x 2,048: at TP=2 a row of `down` has 768 bytes."""
    spec = model(EXPERTS)
    assert padding(spec, ranks=1) == 48 * 128 * (2 * 768 + 2048) * overhead.ROW_PADDING_BYTES
    assert padding(spec, ranks=2) == 48 * 128 * 768 * overhead.ROW_PADDING_BYTES
    assert padding(spec, ranks=2, expert_ranks=2) == 48 * 64 * (2 * 768 + 2048) * overhead.ROW_PADDING_BYTES


def test_the_cache_is_smaller_by_it() -> None:
    spec = model(EXPERTS)
    amd, other = estimate(spec, "mi300x", tp=2), estimate(spec, "b200-180gb", tp=2)
    assert amd.weight_bytes == other.weight_bytes
    assert amd.model_loading_bytes - other.model_loading_bytes == padding(spec, ranks=2)


@pytest.mark.parametrize(("ranks", "nccl"), [(1, 0), (2, overhead.RCCL_BYTES), (4, overhead.RCCL_BYTES)])
def test_memory_outside_of_torch(ranks: int, nccl: int) -> None:
    assert estimate("8b", "mi300x", tp=ranks).non_torch_bytes == overhead.ROCM_CONTEXT_BYTES + nccl


def test_only_gpus_of_amd_run_on_rocm() -> None:
    spec = model("8b")
    cpu = replace(accelerator("mi300x"), kind="cpu")
    assert overhead.row_padding_bytes(spec, spec.layers, cpu, 1, 1) == 0
