"""Chooses among layouts and replicas on the same machines by speed: for throughput, or for a time between tokens.

What fits is decided by candidates.py, how fast each is by roofline.py; this module compares and says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.candidates import Candidate, Question
from hpc_serve.plan.layout import Layout, layouts_on
from hpc_serve.plan.memory import MemoryEstimate
from hpc_serve.plan.roofline import EXPECTED, PerformanceEstimate, Roofline, Traffic, estimate_performance
from hpc_serve.plan.roofline_report import limit_lines

_NODES = (1, 2, 4, 8, 16)
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is wanted: most tokens per second, within `tpot_s` between tokens and `ttft_s` to the first where given."""

    tpot_s: float | None = None
    ttft_s: float | None = None

    def is_met(self, estimate: PerformanceEstimate) -> bool:
        """Whether the expected times are within those asked for."""
        speed = estimate.expected
        in_time = self.tpot_s is None or speed.tpot_s <= self.tpot_s
        return in_time and (self.ttft_s is None or speed.ttft_s <= self.ttft_s)

    def __str__(self) -> str:
        named = (("tpot", self.tpot_s), ("ttft", self.ttft_s))
        limits = [f"{name} of {1000 * limit:g} ms" for name, limit in named if limit is not None]
        return "throughput" + (" within a " + " and a ".join(limits) if limits else "")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to use the machines: `replicas` engines of a layout, each with `estimate` at its best batch."""

    layout: Layout
    replicas: int
    memory: MemoryEstimate
    estimate: PerformanceEstimate
    meets: bool

    @property
    def tokens_per_s(self) -> float:
        """Expected output tokens per second of all replicas."""
        return self.replicas * self.estimate.expected.output_tokens_per_s

    def __str__(self) -> str:
        many = f"{self.replicas} replicas of " if self.replicas > 1 else "one "
        return f"{many}TP={self.layout.tensor_parallel_size} PP={self.layout.pipeline_parallel_size}"


def parse_target(text: str) -> Target:
    """Read `throughput`, `tpot=50ms`, or several such limits joined by commas. Raises InvalidRequestError."""
    limits: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(tpot|ttft)=(\d+(?:\.\d+)?)(ms|s)", part)
        if match and float(match[2]) > 0:
            limits[f"{match[1]}_s"] = float(match[2]) * _UNITS[match[3]]
        elif part != "throughput":
            raise InvalidRequestError(f"target is {text!r}: write throughput, tpot=50ms, ttft=2s, or both limits.")
    return Target(**limits)


def choose(question: Question, traffic: Traffic, target: Target) -> tuple[Option, list[str]]:
    """The fastest option that meets the target, and the reasons.

    `traffic.concurrency` above 1 is what all replicas together are asked for; 1 leaves the batch free. Raises
    DoesNotFitError where nothing fits, or nothing is in time, with the nearest.
    """
    options, small = _options(question, traffic, target)
    if not options:
        raise DoesNotFitError(
            f"{question.model.name} fits no layout of these machines with requests of "
            f"{question.max_model_len:,} tokens; `plan` without --target says what would help."
        )
    met = sorted((option for option in options if option.meets), key=lambda option: -option.tokens_per_s)
    if not met:
        nearest = min(options, key=lambda option: option.estimate.expected.tpot_s)
        speed = nearest.estimate.expected
        raise DoesNotFitError(
            f"no layout reaches {target}: the nearest is {nearest} with {1000 * speed.tpot_s:.1f} ms between tokens "
            f"and {1000 * speed.ttft_s:.0f} ms to the first, {nearest.estimate.traffic.concurrency} in flight "
            f"(ideally {1000 * nearest.estimate.ideal.tpot_s:.1f} ms between tokens); use an accelerator with faster "
            "memory, fewer bits a weight (--quantization fp8), or a looser target."
        )
    reasons = _reasons(met, [option for option in options if not option.meets], small, target)
    widest = max(options, key=lambda option: option.layout.tensor_parallel_size)
    roofline = Roofline(question.model, question.cluster.accelerator, question.engine, widest.layout)
    return met[0], [*reasons, *limit_lines(roofline)]


def _options(question: Question, traffic: Traffic, target: Target) -> tuple[list[Option], list[Candidate]]:
    """(options, layouts that hold less than one request), on the fewest nodes on which there is an option."""
    cluster = question.cluster
    found: list[Option] = []
    small: list[Candidate] = []
    for nodes in [cluster.num_nodes] if cluster.num_nodes else _NODES:
        for layout, replicas in _ways(question, nodes):
            candidate = question.consider(layout)
            if candidate.memory is None or not candidate.memory.holds(1):
                small.append(candidate)
                continue
            roofline = Roofline(question.model, cluster.accelerator, question.engine, layout)
            best = _best_batch(roofline, traffic, candidate.memory, target, replicas)
            found.append(
                Option(
                    layout=layout,
                    replicas=replicas,
                    memory=candidate.memory,
                    estimate=best,
                    meets=target.is_met(best),
                )
            )
        if found:
            break
    return found, small


def _ways(question: Question, nodes: int) -> Iterator[tuple[Layout, int]]:
    """(layout, replicas): every even way to fill so many nodes, with engines over all of them or within one.

    No more stages than nodes: what pipelines lose to bubbles is in no measurement that the factors are fitted on.
    """
    cluster, engine = question.cluster, question.engine
    asked = engine.tensor_parallel_size or engine.pipeline_parallel_size
    for used in sorted({nodes, 1}, reverse=True):
        for layout in layouts_on(used, cluster, engine):
            copies, rest = divmod(nodes * cluster.node_size, layout.num_gpus)
            if asked or (rest == 0 and layout.pipeline_parallel_size <= used):
                yield layout, copies


def _best_batch(
    roofline: Roofline, traffic: Traffic, memory: MemoryEstimate, target: Target, replicas: int
) -> PerformanceEstimate:
    """The estimate at the largest batch in time (or at the traffic's own concurrency, where that is said)."""

    def at(concurrency: int) -> PerformanceEstimate:
        return estimate_performance(roofline, replace(traffic, concurrency=concurrency), memory, factors=EXPECTED)

    if traffic.concurrency > 1:
        return at(-(-traffic.concurrency // replicas))
    low = at(1)
    high = max(1, int(min(low.capacity, roofline.places)))
    if target.is_met(at(high)) or not target.is_met(low):
        return at(high) if target.is_met(at(high)) else low
    least = 1
    while high - least > 1:
        middle = (least + high) // 2
        least, high = (middle, high) if target.is_met(at(middle)) else (least, middle)
    return at(least)


def _reasons(met: list[Option], missed: list[Option], small: list[Candidate], target: Target) -> list[str]:
    best = met[0]
    speed = best.estimate.expected
    reasons = [
        f"For {target}: {best} gives {best.tokens_per_s:,.0f} tokens/s in all, {1000 * speed.tpot_s:.1f} ms between "
        f"tokens, with {best.estimate.traffic.concurrency} requests in flight in each; {best.estimate.bound} binds."
    ]
    for other in met[1:4]:
        share = other.tokens_per_s / best.tokens_per_s
        reasons.append(
            f"Not {other}: {other.tokens_per_s:,.0f} tokens/s ({100 * share:.0f} %) at "
            f"{other.estimate.traffic.concurrency} in flight in each; {_spent(other)}."
        )
    for other in missed[:2]:
        late = 1000 * other.estimate.expected.tpot_s
        reasons.append(f"Not {other}: {late:.1f} ms between tokens; {_spent(other)}.")
    reasons += [f"Not {candidate.layout}: {candidate.reason}." for candidate in small if candidate.memory][:2]
    return reasons


def _spent(option: Option) -> str:
    """What the time of an option goes to, with the share of communication where layers are cut."""
    if option.layout.num_gpus == 1:
        return f"{option.estimate.bound} binds"
    share = 100 * option.estimate.expected.causes["communication"]
    return f"{option.estimate.bound} binds, communication takes {share:.0f} %"
