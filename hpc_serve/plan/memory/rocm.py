"""Counts the memory that a rank takes on ROCm in addition to CUDA: padded rows of weights, the runtime, RCCL."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.plan.hardware.accelerator import AcceleratorSpec
from hpc_serve.plan.model.spec import DecoderLayer, ModelSpec, distinct_layers
from hpc_serve.plan.model.weights import Block, Linear
from hpc_serve.sizes import GIB

ROW_PADDING_BYTES = 256
PADDED_ROWS_MULTIPLE = 512
"""vLLM moves rows of weights apart where they are multiples of 512 bytes: VLLM_ROCM_FP8_PADDING for matrices in fp8 per
tensor and in blocks (quantization/utils/fp8_utils.py), VLLM_ROCM_MOE_PADDING for experts in 16 bit
(fused_moe/unquantized_fused_moe_method.py). Both are on by default. Llama 3.1 405B of AMD on MI300X: 49.32 GiB at TP=8
(47.77 without, 49.23 with), 97.43 at TP=4 (95.51, 97.43)."""

PADDED_PER_TENSOR = ("fp8", "compressed_tensors")
"""Methods whose matrices with one scale for each tensor are padded. Those of Quark and ModelOpt are not, and none that
vLLM quantises itself."""

ROCM_CONTEXT_BYTES = GIB * 66 // 100
"""How much memory outside of torch grows during the profile run: 0.66 GiB in four logs of vLLM 0.9.2 on one MI300X
(github.com/cmontemuino/amd-mi300x-ml-benchmarks), where an H100 has 0.13."""

RCCL_BYTES = GIB
"""The first communicator of RCCL takes about 1 GiB of each rank on MI250X (github.com/Lumi-supercomputer/LUMI-AI-Guide,
issue 111). Several ranks take at least that."""


def is_rocm(accelerator: AcceleratorSpec) -> bool:
    """Return whether vLLM runs on ROCm there."""
    return accelerator.kind == "gpu" and accelerator.vendor == "AMD"


def row_padding_bytes(
    model: ModelSpec, layers: Sequence[DecoderLayer], accelerator: AcceleratorSpec, ranks: int, expert_ranks: int
) -> int:
    """Return the bytes between rows of weights on one rank of a stage. 0 where vLLM does not run on ROCm."""
    if not is_rocm(accelerator):
        return 0
    return sum(
        count * _block_padding(layer.block, model, ranks, expert_ranks) for layer, count in distinct_layers(layers)
    )


def _block_padding(block: Block, model: ModelSpec, ranks: int, expert_ranks: int) -> int:
    total = 0
    for weight in block.weights:
        if not isinstance(weight, Linear) or not _is_padded(weight, model):
            continue
        divides = weight.is_expert and expert_ranks > 1
        copies = -(-weight.copies // expert_ranks) if divides else weight.copies
        outputs, inputs = weight.shard(1 if divides else ranks)
        row_bytes = int(inputs * weight.scheme.weight_bits / 8)
        if row_bytes % PADDED_ROWS_MULTIPLE == 0:
            total += copies * sum(outputs) * ROW_PADDING_BYTES
    return total


def _is_padded(weight: Linear, model: ModelSpec) -> bool:
    scheme, quantization = weight.scheme, model.quantization
    if weight.is_expert:
        return scheme.weight_bits == 16
    if scheme.weight_bits != 8 or not scheme.name.startswith("fp8"):
        return False
    if scheme.granularity == "block":
        return True
    is_read = quantization.method in PADDED_PER_TENSOR and not quantization.is_assumed
    return scheme.granularity == "tensor" and is_read
