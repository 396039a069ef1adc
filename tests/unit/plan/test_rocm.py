"""What a rank takes on ROCm beside what it takes on CUDA: padded rows, the runtime, RCCL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.plan import accelerator
from hpc_serve.plan.memory.overhead import RCCL_BYTES, ROCM_CONTEXT_BYTES, ROW_PADDING_BYTES, row_padding_bytes
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.units import GIB
from tests.support.configs import built, config_of
from tests.support.plans import estimate

DENSE, EXPERTS = "meta-llama/Llama-3.1-405B-Instruct", "Qwen/Qwen3-30B-A3B"


def model(name: str, quantization: dict[str, Any] | None = None, override: str | None = None) -> ModelSpec:
    changes = {"quantization_config": quantization} if quantization else {}
    return built(config_of(name, **changes), quantization=override)


def padding(spec: ModelSpec, gpu: str = "mi300x", ranks: int = 8, expert_ranks: int = 1) -> int:
    return row_padding_bytes(spec, spec.layers, accelerator(gpu), ranks, expert_ranks)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_row_of_fp8_per_tensor_is_padded(ranks: int) -> None:
    """The rows of 126 layers: q, k and v and gate and up are divided, the outputs of attention and MLP are not."""
    rows = (16384 + 2 * 8 * 128) // ranks + 16384 + 2 * 53248 // ranks + 16384
    fp8 = model(DENSE, {"quant_method": "fp8", "activation_scheme": "static"})
    assert padding(fp8, ranks=ranks) == 126 * rows * ROW_PADDING_BYTES


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
    assert padding(spec, ranks=1) == 48 * 128 * (2 * 768 + 2048) * ROW_PADDING_BYTES
    assert padding(spec, ranks=2) == 48 * 128 * 768 * ROW_PADDING_BYTES
    assert padding(spec, ranks=2, expert_ranks=2) == 48 * 64 * (2 * 768 + 2048) * ROW_PADDING_BYTES


def test_the_cache_is_smaller_by_it() -> None:
    spec = model(EXPERTS)
    amd, other = estimate(spec, "mi300x", tp=2), estimate(spec, "b200-180gb", tp=2)
    assert amd.weight_bytes == other.weight_bytes
    assert amd.model_loading_bytes - other.model_loading_bytes == padding(spec, ranks=2)


@pytest.mark.parametrize(("ranks", "nccl"), [(1, 0), (2, RCCL_BYTES), (4, RCCL_BYTES)])
def test_memory_outside_of_torch(ranks: int, nccl: int) -> None:
    assert estimate("8b", "mi300x", tp=ranks).non_torch_bytes == ROCM_CONTEXT_BYTES + nccl


def test_more_ranks_take_no_less() -> None:
    assert estimate("8b", "mi300x", tp=8).non_torch_bytes >= estimate("8b", "mi300x", tp=2).non_torch_bytes


def test_only_gpus_of_amd_run_on_rocm() -> None:
    spec = model("8b")
    cpu = replace(accelerator("mi300x"), kind="cpu")
    assert row_padding_bytes(spec, spec.layers, cpu, 1, 1) == 0
