"""Corrects a printed speed by what was measured: runs on this site, and drafts that were published.

The correction by runs is a geometric mean of measured / printed. A run weighs the inverse of its variance: that of its
distance to the plan, and the square of how much slower it is than the other runs here explain, because other programs
can only slow an engine. A run without another is compared with the published range. The weight of that range is taken
off, so a run that is no surer than the range does not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_serve.plan.catalog import load_data
from hpc_serve.plan.engine import EngineConfig


@dataclass(frozen=True, kw_only=True)
class KnownDraft:
    """What was published of a draft model: a step gave `tokens` with so many `drafts`. `texts` is what was asked."""

    model: str
    draft: str
    method: str
    drafts: int
    tokens: float
    texts: str
    source: str

    def acceptance_length(self, drafts: int) -> float:
        """Return the tokens of a step with another number of drafts, each accepted with the same probability.

        That is (1 - a^(drafts + 1)) ÷ (1 - a): equation 1 of arXiv:2211.17192. `a` follows from what was published.
        """
        if drafts == self.drafts:
            return self.tokens
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if _expected(middle, self.drafts) < self.tokens else (low, middle)
        return _expected(low, drafts)


def _expected(accepted: float, drafts: int) -> float:
    return sum(accepted**count for count in range(drafts + 1))


def known_drafts(model: str) -> list[KnownDraft]:
    """Return the draft models of which something was published, for a model by its repository's name."""
    return [KnownDraft(**one) for one in load_data("drafts.json")["drafts"] if one["model"].lower() == model.lower()]


def known_draft(model: str, engine: EngineConfig) -> KnownDraft | None:
    """Return what was published of the draft model that the engine loads, or of the model's own layers."""
    if not engine.speculative_tokens:
        return None
    name = "" if engine.speculates_with_own_layers else str((engine.speculative_config or {}).get("model"))
    return next((one for one in known_drafts(model) if one.draft.lower() == name.lower()), None)


REPEATED = 0.09
"""Standard deviation of the logarithm of measured / printed between a run and its repetition. Each step between two
runs adds as much. Published rows differ so (docs/evidence/learned.md)."""
_ANY_RATIO = (1e-9, 1e9)
"""The range of a speed of which nothing is published."""
_OF_RANGE = 1.44
"""Standard deviations to each side that hold 17 of 20 values of a normal distribution, as the published range does."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a speed is of: the accelerator, numbers (model size, layout, requests) and words (model, format, …)."""

    accelerator: str
    numbers: Mapping[str, float] = field(hash=False)
    words: Mapping[str, str] = field(hash=False)

    def steps(self, other: Case) -> float:
        """Return the steps to another case of the accelerator: doublings of each number, and words that differ."""
        names = self.numbers.keys() & other.numbers.keys()
        doublings = sum(abs(math.log2(self.numbers[name] / other.numbers[name])) for name in names)
        words = self.words.keys() | other.words.keys()
        return doublings + sum(self.words.get(name) != other.words.get(name) for name in words)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run of `bench`: its case, and output tokens/s of the service as measured and as printed without any run.

    It was kept `at` seconds since the epoch.
    """

    case: Case
    tokens_per_s: float
    printed_tokens_per_s: float
    service: str = ""
    at: float = 0.0

    @property
    def log_ratio(self) -> float:
        """The natural logarithm of measured / printed."""
        return math.log(self.tokens_per_s / self.printed_tokens_per_s)

    @property
    def is_sane(self) -> bool:
        """Whether all its numbers are above 0, and its ratio is one that can be."""
        numbers = (self.tokens_per_s, self.printed_tokens_per_s, *self.case.numbers.values())
        low, high = _ANY_RATIO
        return min(numbers) > 0 and low < self.tokens_per_s / self.printed_tokens_per_s < high


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What `runs` near runs say: printed tokens/s are multiplied by `ratio`.

    17 of 20 measurements would be between the `bounds`, in multiples of the corrected figure.
    """

    runs: int
    ratio: float
    bounds: tuple[float, float]


class MeasuredHere:
    """The runs that were measured on one accelerator of this site."""

    def __init__(self, runs: Sequence[MeasuredRun], accelerator: str) -> None:
        self.runs = [run for run in runs if run.case.accelerator == accelerator]
        self._excess = [self._slowness(run) for run in self.runs]

    def _slowness(self, run: MeasuredRun) -> float:
        """Return by how much a run is slower than the others explain, which differ by their steps."""
        others = (one for one in self.runs if one is not run)
        slower = (one.log_ratio - run.log_ratio - deviation(one.case.steps(run.case)) for one in others)
        return max(0.0, max(slower, default=0.0))

    def correction(self, case: Case, published: Sequence[float] | None) -> Correction | None:
        """Return the correction of a printed speed. None where no run is surer than published sources.

        `published` are the bounds of measured / printed tokens/s by published sources. Without them a run that is the
        only one says nothing.
        """
        if published is None and len(self.runs) < 2:
            return None
        low, high = map(math.log, published or _ANY_RATIO)
        spread = (high - low) / 2 / _OF_RANGE
        excess = self._excess if len(self.runs) > 1 else [_outside(run.log_ratio, low, high) for run in self.runs]
        weights, logs = [], []
        for run, beyond in zip(self.runs, excess, strict=True):
            usual = deviation(run.case.steps(case))
            weight = 1 / (usual**2 + beyond**2) - 1 / spread**2
            if weight > 0:
                weights.append(weight)
                logs.append(run.log_ratio)
        if not weights:
            return None
        mean = sum(weight * ratio for weight, ratio in zip(weights, logs, strict=True)) / sum(weights)
        # Runs of one site err alike: many of them are as sure as the surest.
        unknown = 1 / (1 + max(weights) * spread**2)
        width = math.sqrt(unknown)
        return Correction(
            runs=len(weights),
            ratio=math.exp((1 - unknown) * mean),
            bounds=(math.exp(width * low), math.exp(width * high)),
        )


def _outside(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0)


def deviation(steps: float) -> float:
    """Return the standard deviation of the logarithm of measured / printed between two runs so many steps apart."""
    return REPEATED * (1 + steps)
