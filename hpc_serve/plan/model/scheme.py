"""Storage formats of weights, and the rules by which a `quantization_config` gives modules another format or none.

A format gives the bytes that a matrix takes once vLLM has loaded it, with scales and bias. vLLM refuses tensor
parallelism that would divide a block or a group of scales, and so does this module. quantization.py decides which
module has which scheme.

Anybody can write a rule: an expression that might take for ever to match is refused. GPTQModel's `dynamic` rules follow
vLLM's quantization/utils/gptq_utils.py and quantization/auto_gptq.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from hpc_serve.errors import DoesNotFitError, InvalidRequestError

# -- modules that are not quantized

_LONGEST_EXPRESSION = 1000
_MOST_EXPRESSIONS = 1000
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+{]")
_MOST_REPETITIONS = 4
"""(a+)+, or many of them in a row: matching may take longer than anybody waits."""


def is_skipped(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the patterns matches a module's name.

    A pattern is a module's name, some dotted parts of it, with `*` for any text, or `re:` and a regular expression.

    >>> is_skipped("model.layers.3.mlp.gate", ("lm_head", "mlp.gate")), is_skipped("model.gates", ("gate",))
    (True, False)
    """
    names, expression = _matchers(patterns)
    if any(run in names for run in _runs(module)):
        return True
    return expression is not None and expression.search(module) is not None


@lru_cache(maxsize=32)
def _matchers(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Return the patterns that are plain names, and one expression for all other patterns. There may be many names."""
    names: set[str] = set()
    expressions: list[str] = []
    for pattern in patterns:
        if not pattern.startswith("re:") and "*" not in pattern:
            names.add(pattern.strip("."))
        elif len(expressions) == _MOST_EXPRESSIONS:
            raise InvalidRequestError(
                f"quantization_config skips modules by more than {_MOST_EXPRESSIONS:,} patterns with * or re:."
            )
        elif pattern.startswith("re:"):
            expressions.append(f"(?:^(?:{_checked_expression(pattern[3:])}))")
        else:
            text = re.escape(_checked_expression(pattern, is_text=True).strip("."))
            expressions.append(r"(?:^|\.)" + re.sub(r"(?:\\\*)+", ".*", text) + r"(?:\.|$)")
    return frozenset(names), re.compile("|".join(expressions)) if expressions else None


def _checked_expression(expression: str, *, is_text: bool = False) -> str:
    """Return the expression. Raises InvalidRequestError where it is none, or may take for ever to match."""
    try:
        repeats = len(_REPETITION.findall(expression)) > _MOST_REPETITIONS
        if repeats or len(expression) > _LONGEST_EXPRESSION or (not is_text and _REPEATED_GROUP.search(expression)):
            raise re.error(
                f"it repeats a group, or {_MOST_REPETITIONS + 1} parts, or is longer than {_LONGEST_EXPRESSION} letters"
            )
        if not is_text:
            re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            f"quantization_config names modules by {expression[:40]!r}, which this planner does not match: {error}."
        ) from None
    return expression


def _runs(module: str) -> Iterator[str]:
    """Return every run of the dotted parts of a name: a.b gives a, a.b and b."""
    parts = module.split(".")
    return (".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))


# -- storage formats

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


# -- modules with other bits or groups than the rest, or with none: `dynamic`

_BITS = (4, 8)
FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "experts": ("experts", ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj")),
}
"""vLLM's names of fused modules, by the names that hpc_serve has for them, and their names in a checkpoint."""
DynamicRules: TypeAlias = tuple[tuple[str, Scheme], ...]
"""Each rule's expression for the beginning of a module's name, and the scheme of the modules that it matches.

The first rule that matches a name decides. vLLM matches the names of its modules, and q, k and v are one matrix there.
"""


def dynamic_rules(config: Mapping[str, Any], plain: Scheme) -> DynamicRules:
    """Return the rules of a `quantization_config`. Raises InvalidRequestError for what vLLM refuses."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise InvalidRequestError("The config's quantization_config.dynamic must be an object.")
    if len(dynamic) > _MOST_EXPRESSIONS:
        raise InvalidRequestError(f"quantization_config.dynamic has more than {_MOST_EXPRESSIONS:,} rules.")
    rules = []
    for pattern, settings in dynamic.items():
        scheme = plain if pattern.startswith("-:") else _checked_scheme(config, pattern, settings)
        rules.append((_checked_expression(pattern.removeprefix("-:" if scheme is plain else "+:")), scheme))
    return tuple(rules)


def _checked_scheme(config: Mapping[str, Any], pattern: str, settings: Any) -> Scheme:
    """Return the scheme of a rule's modules. Raises InvalidRequestError where vLLM refuses it."""
    if not isinstance(settings, Mapping) or "gptq" not in str(config.get("quant_method")):
        raise InvalidRequestError(
            f"quantization_config.dynamic has no settings of GPTQ for {pattern[:60]!r}: vLLM takes such rules, each an "
            "object, with quant_method gptq alone."
        )
    whole = {"bits": 4, "group_size": 128, "sym": True, **config, **settings}
    bits, group, ordered = whole["bits"], whole["group_size"], whole.get("desc_act")
    if type(bits) is not int or bits not in _BITS or type(group) is not int or not whole["sym"]:
        raise InvalidRequestError(
            f"quantization_config.dynamic has bits={str(bits)[:20]}, group_size={str(group)[:20]} and "
            f"sym={str(whole['sym'])[:20]} for {pattern[:60]!r}: vLLM takes 4 or 8 bits with sym alone."
        )
    if ordered and group != -1:
        raise InvalidRequestError(
            f"quantization_config.dynamic has desc_act with groups of {group} for {pattern[:60]!r}: vLLM takes "
            "desc_act with group_size -1 alone."
        )
    return int_groups(bits, group, zero_points=False)


def dynamic_scheme(rules: DynamicRules, base: Scheme, plain: Scheme, module: str, *, is_fused: bool) -> Scheme:
    """Return the scheme of a module. `is_fused`: vLLM holds it and those beside it in the checkpoint as one matrix.

    Raises InvalidRequestError where the checkpoint's modules have another scheme than vLLM's one matrix.
    """
    last = module.rpartition(".")[2]
    before = module.removesuffix(last)
    fused, names = FUSED.get(last, (last, (last,))) if is_fused else (last, (last,))
    found = _first_match(rules, base, before + fused)
    own = {_first_match(rules, base, before + name) for name in names}
    if own in ({base}, {found}):
        return found
    if own == {plain} and last != "experts":
        return plain
    kinds = " and ".join(sorted({scheme.name for scheme in own | {found}}))
    raise InvalidRequestError(
        f"quantization_config.dynamic asks for {kinds} in {before}{fused}: vLLM takes one kind for this name, and "
        f"cannot load {', '.join(names)} of another."
    )


def _first_match(rules: DynamicRules, base: Scheme, name: str) -> Scheme:
    return next((scheme for rule, (_, scheme) in zip(_compiled(rules), rules) if rule.match(name)), base)


@lru_cache(maxsize=8)
def _compiled(rules: DynamicRules) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(expression) for expression, _ in rules)
