"""Storage formats of weights: the bytes a matrix takes once vLLM has loaded it, with scales and bias.

vLLM refuses tensor parallelism that would divide a block or a group of scales, and so does this module. quantization.py
decides which module has which scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from hpc_serve.errors import DoesNotFitError, InvalidRequestError

Granularity = Literal["none", "tensor", "channel", "group", "block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One storage format. `group` is in input features, `block` in (output, input) features.

    `bias_bytes` are those of one element of a bias, which is never quantised. `expert_align` are the multiples to which
    fused kernels pad the hidden and the intermediate size of experts on each rank.
    """

    name: str
    weight_bits: float
    granularity: Granularity = "none"
    scale_bytes: int = 0
    zero_point_bits: float = 0
    group: int = 0
    block: tuple[int, int] = (0, 0)
    bias_bytes: int = 2
    expert_align: tuple[int, int] = (1, 1)

    def linear_bytes(self, outputs: Sequence[int], inputs: int, *, bias: bool) -> int:
        """Return the bytes of one fused matrix with its scales and its bias."""
        rows = sum(outputs)
        total = rows * inputs * self.weight_bits / 8
        if self.granularity == "tensor":
            total += self.scale_bytes * len(outputs)
        elif self.granularity == "channel":
            total += self.scale_bytes * rows
        elif self.granularity == "group":
            groups = max(1, inputs // self.group)
            total += rows * groups * (self.scale_bytes + self.zero_point_bits / 8)
        elif self.granularity == "block":
            out_block, in_block = self.block
            total += self.scale_bytes * sum(-(-out // out_block) for out in outputs) * -(-inputs // in_block)
        return int(total) + (rows * self.bias_bytes if bias else 0)

    def check_cut(self, shares: Sequence[int], *, is_output: bool, name: str) -> None:
        """Raise DoesNotFitError where a rank's share ends inside a block or a group, which vLLM refuses.

        Sources: `validate_fp8_block_shape` in quantization/utils/fp8_utils.py, `verify_marlin_supports_shape` in
        quantization/utils/marlin_utils.py.
        """
        if self.granularity == "block":
            unit = self.block[0] if is_output else self.block[1]
        elif self.granularity == "group" and not is_output:
            unit = self.group
        else:
            return
        for share in shares:
            if share % unit:
                side = "outputs" if is_output else "inputs"
                raise DoesNotFitError(
                    f"{name} would have {share} {side} on a rank, which its {self.name} of {unit} do not divide"
                )


BF16 = Scheme(name="bfloat16", weight_bits=16)
FP16 = Scheme(name="float16", weight_bits=16)
FP32 = Scheme(name="float32", weight_bits=32, bias_bytes=4)
FP8_TENSOR = Scheme(name="fp8", weight_bits=8, granularity="tensor", scale_bytes=4)
FP8_CHANNEL = Scheme(name="fp8 (per channel)", weight_bits=8, granularity="channel", scale_bytes=4)
FP8_BLOCK = Scheme(name="fp8 (blocks)", weight_bits=8, granularity="block", scale_bytes=4, block=(128, 128))
INT8_CHANNEL = Scheme(name="int8 w8a8", weight_bits=8, granularity="channel", scale_bytes=4)
MXFP4 = Scheme(name="mxfp4", weight_bits=4, granularity="group", scale_bytes=1, group=32, expert_align=(256, 128))
"""Padded as Marlin and TensorRT-LLM kernels need it: `mxfp4_round_up_hidden_size_and_intermediate_size` in vLLM's
fused_moe/oracle/mxfp4.py. For gpt-oss-120b Marlin prints 65.97 GiB (65.94 by this). The Triton kernels that newer
versions take on Hopper print 64.38. They pad the inputs of the values to 256 and the outputs of the scales to 256, and
nothing else (HopperMXValueLayout, HopperMXScaleLayout of triton_kernels): that gives 64.38. Their activations are 6 GiB
more than the plan's in the same log, so the smaller weights alone would promise a cache that is not there."""
MXFP8 = Scheme(name="mxfp8", weight_bits=8, granularity="group", scale_bytes=1, group=32)
NVFP4 = Scheme(name="nvfp4", weight_bits=4, granularity="group", scale_bytes=1, group=16)
BNB_INT4 = Scheme(name="bitsandbytes nf4", weight_bits=4, granularity="group", scale_bytes=4, group=64)
BNB_INT8 = Scheme(name="bitsandbytes int8", weight_bits=8, granularity="channel", scale_bytes=4)


def fp8_blocks(block: Sequence[int]) -> Scheme:
    """Return fp8 with a 32-bit scale for each block of (output, input) features.

    Raises InvalidRequestError for another block size.
    """
    if len(block) != 2 or any(type(size) is not int or not 1 <= size <= 2**20 for size in block):
        raise InvalidRequestError(f"weight_block_size is {str(block)[:40]}: it must be two whole numbers.")
    return FP8_BLOCK if tuple(block) == FP8_BLOCK.block else replace(FP8_BLOCK, block=(block[0], block[1]))


@lru_cache(maxsize=64)
def int_groups(bits: int, group: int, zero_points: bool) -> Scheme:
    """Return AWQ and GPTQ: packed integers, a 16-bit scale for each group, and packed zero points where asymmetric."""
    name = f"int{bits} groups of {group}" if group > 0 else f"int{bits} per channel"
    if group <= 0:
        return Scheme(name=name, weight_bits=bits, granularity="channel", scale_bytes=2)
    return Scheme(
        name=name,
        weight_bits=bits,
        granularity="group",
        scale_bytes=2,
        zero_point_bits=bits if zero_points else 0,
        group=group,
    )


def plain_scheme(dtype: str) -> Scheme:
    """Return the scheme of weights in `dtype`, by torch's name. Raises InvalidRequestError for another type."""
    name = dtype.removeprefix("torch.")
    known = {"bfloat16": BF16, "float16": FP16, "half": FP16, "float32": FP32, "float": FP32}
    if name not in known:
        raise InvalidRequestError(f"dtype is {dtype[:40]!r}: use bfloat16, float16 or float32.")
    return known[name]
