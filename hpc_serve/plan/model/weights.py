"""Weights as vLLM lays them out: which parts tensor parallelism divides, which it copies, which it pads.

A model is a list of weights. The bytes of a weight follow from its scheme (quantization.py) and the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan.model.scheme import BF16, Scheme

VOCAB_PADDING = 64
"""Rows to which vLLM rounds a vocabulary (DEFAULT_VOCAB_PADDING_SIZE in vocab_parallel_embedding.py)."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`.

    >>> round_up(151_669, 64)
    151680
    """
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Part:
    """Features in `units` that stay on one rank, each `width` wide.

    `replicate`: where there are more ranks than units, several ranks hold the same unit (KV heads). `align`: a rank's
    share is padded to a multiple of this, for kernels that work on tiles.
    """

    units: int
    width: int = 1
    replicate: bool = False
    align: int = 1

    @property
    def size(self) -> int:
        """Features in all."""
        return self.units * self.width

    def per_rank(self, ranks: int, name: str) -> int:
        """Return the features on each of `ranks` ranks. Raises DoesNotFitError if vLLM refuses to divide them."""
        if self.units % ranks == 0:
            return round_up(self.units // ranks * self.width, self.align)
        if self.replicate and ranks % self.units == 0:
            return round_up(self.width, self.align)
        what = f"{self.units} units of {self.width}" if self.width > 1 else f"{self.units} features"
        raise DoesNotFitError(f"{name} has {what}, which {ranks} ranks do not divide")


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A matrix, or several fused ones that share their input: `outputs` of q, k and v, or of gate and up.

    `split`: "column" divides the outputs among the ranks. "row" divides the inputs, and each rank holds the whole bias.
    "none" copies the matrix to each rank. `copies` is the number of matrices in one tensor: more than one for experts,
    which expert parallelism divides instead.
    """

    name: str
    inputs: Part
    outputs: tuple[Part, ...]
    split: Literal["column", "row", "none"] = "none"
    bias: bool = False
    copies: int = 1
    is_expert: bool = False
    scheme: Scheme = BF16

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint, without scales."""
        rows = sum(part.size for part in self.outputs)
        return self.copies * rows * (self.inputs.size + self.bias)

    def shard(self, ranks: int) -> tuple[list[int], int]:
        """Return (output features of each fused part, input features) on one rank."""
        column = ranks if self.split == "column" else 1
        row = ranks if self.split == "row" else 1
        outputs = [part.per_rank(column, self.name) for part in self.outputs]
        return outputs, self.inputs.per_rank(row, self.name)

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank. `expert_ranks` above 1 divides whole experts instead of their matrices."""
        copies = self.copies
        if self.is_expert and expert_ranks > 1:
            copies, ranks = -(-self.copies // expert_ranks), 1
        outputs, inputs = self.shard(ranks)
        if ranks > 1 and self.split != "none":
            cut = outputs if self.split == "column" else [inputs]
            self.scheme.check_cut(cut, is_output=self.split == "column", name=self.name)
        return copies * self.scheme.linear_bytes(outputs, inputs, bias=self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """An embedding table or output head. vLLM pads its rows and then divides them."""

    name: str
    rows: int
    width: int
    scheme: Scheme = BF16

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return self.rows * self.width

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank."""
        rows = Part(round_up(self.rows, VOCAB_PADDING)).per_rank(ranks, f"the padded vocabulary of {self.name}")
        return self.scheme.linear_bytes([rows], self.width, bias=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vector:
    """Norms, sinks, convolutions, positions: never quantised. `split`: ranks divide it as they divide the heads.

    `units`: it has so many equal units, and where there are more ranks than units, several ranks hold the same unit.
    """

    name: str
    size: int
    split: bool = False
    element_bytes: int = 2
    units: int = 0

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return self.size

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank."""
        part = Part(self.units, self.size // self.units, replicate=True) if self.units else Part(self.size)
        return self.element_bytes * part.per_rank(ranks if self.split else 1, self.name)


Weight: TypeAlias = Linear | Vocabulary | Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Weights that stay on one pipeline stage together: a decoder layer, a vision tower, the final norm."""

    weights: tuple[Weight, ...] = ()

    @property
    def experts(self) -> tuple[Linear, ...]:
        """Those that are matrices of routed experts."""
        return tuple(weight for weight in self.weights if isinstance(weight, Linear) and weight.is_expert)

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return sum(weight.parameters for weight in self.weights)

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one tensor-parallel rank."""
        return sum(weight.bytes_per_rank(ranks, expert_ranks) for weight in self.weights)
