"""Chooses layout and replicas by speed: for most tokens per second, within times per token where they are given.

choice/candidates.py decides what fits, estimate.py how fast it is. This module compares and gives the reasons.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.choice.candidates import Candidate, PlanInputs
from hpc_serve.plan.choice.layout import Layout, data_parallel_layouts, layouts_on
from hpc_serve.plan.speed.estimate import PIPELINE_STAGES, ReplicaSpeeds, SpeedEstimate
from hpc_serve.plan.speed.measured import MeasuredHere
from hpc_serve.plan.speed.step import Roofline, limit_lines
from hpc_serve.plan.speed.throughput import Traffic

_NODES = (1, 2, 4, 8, 16)
_EVEN_EXPERTS = (
    "No factor is fitted on engines with data-parallel ranks, and their estimates assume that the experts get equal "
    "work. --explain says how far published runs were off."
)
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """The goal: most tokens per second, with at most `tpot_s` between tokens and `ttft_s` to the first."""

    tpot_s: float | None = None
    ttft_s: float | None = None

    def is_met(self, estimate: SpeedEstimate) -> bool:
        """Return whether the expected times are within the limits."""
        speed = estimate.expected
        in_time = self.tpot_s is None or speed.tpot_s <= self.tpot_s
        return in_time and (self.ttft_s is None or speed.ttft_s <= self.ttft_s)

    def __str__(self) -> str:
        named = (("tpot", self.tpot_s), ("ttft", self.ttft_s))
        limits = [f"{name} of {1000 * limit:g} ms" for name, limit in named if limit is not None]
        return "throughput" + (" within a " + " and a ".join(limits) if limits else "")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """`replicas` engines of one layout on the machines, each with `estimate` at its best batch."""

    replicas: int
    estimate: SpeedEstimate
    meets: bool

    @property
    def layout(self) -> Layout:
        return self.estimate.roofline.layout

    @property
    def tokens_per_s(self) -> float:
        """Expected output tokens per second of all replicas."""
        return self.replicas * self.estimate.expected.output_tokens_per_s

    def __str__(self) -> str:
        many = f"{self.replicas} replicas of " if self.replicas > 1 else "one "
        return f"{many}{self.layout.sizes()}"


def parse_speed_target(text: str) -> SpeedTarget:
    """Read `throughput`, `tpot=50ms`, `ttft=2s`, or both limits with a comma. Raises InvalidRequestError."""
    limits: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(tpot|ttft)=(\d+(?:\.\d+)?)(ms|s)", part)
        if match and float(match[2]) > 0:
            limits[f"{match[1]}_s"] = float(match[2]) * _UNITS[match[3]]
        elif part != "throughput":
            raise InvalidRequestError(f"target is {text!r}: write throughput, tpot=50ms, ttft=2s, or both limits.")
    return SpeedTarget(**limits)


def choose_deployment(
    inputs: PlanInputs, traffic: Traffic, target: SpeedTarget, measured: MeasuredHere | None = None
) -> tuple[Deployment, list[str]]:
    """Return the fastest deployment that meets the target, and the reasons. `measured` are runs here.

    `traffic.concurrency` above 1 is that of all replicas together. 1 leaves the batch to this function. Raises
    DoesNotFitError where no layout fits, and where none is fast enough.
    """
    if traffic.decode_only and target.ttft_s is not None:
        raise InvalidRequestError(
            "ttft is the time of a prompt, and --decode-only has prompts read elsewhere: leave out one of them."
        )
    deployments, small = _deployments(inputs, traffic, target, measured)
    if not deployments:
        raise DoesNotFitError(
            f"{inputs.model.name} fits no layout on these machines with requests of "
            f"{inputs.max_model_len:,} tokens; `plan` without --target says what would help."
        )
    met = sorted((one for one in deployments if one.meets), key=lambda one: -one.tokens_per_s)
    if not met:
        raise DoesNotFitError(_unmet_target_text(deployments, target))
    reasons = _reasons(met, [one for one in deployments if not one.meets], small, target)
    largest = max(deployments, key=lambda one: (one.layout.tensor_parallel_size, -one.layout.data_parallel_size))
    asked = inputs.engine.pipeline_parallel_size
    ranks = _why_ranks(met[0], deployments, target)
    if not inputs.model.num_experts and met[0].replicas > 1:
        ranks = [
            f"Data parallelism is replicas: {inputs.model.name} has no experts to share, and each of the "
            f"{met[0].replicas} replicas starts, stops and fails alone."
        ]
    return met[0], [*reasons, *ranks, *limit_lines(largest.estimate.roofline), *([] if asked else [_few_stages_text()])]


def _few_stages_text() -> str:
    low, high = speed_accuracy()["classes"][PIPELINE_STAGES]["measured_by_printed"]
    return (
        "Engines of more pipeline stages than nodes (on TPUs: of more than one) are left out: published runs of "
        f"{PIPELINE_STAGES} had {low:g} to {high:g} times the estimated tokens/s, and layouts differ by less."
    )


def _why_ranks(best: Deployment, deployments: list[Deployment], target: SpeedTarget) -> list[str]:
    """Say why the best deployment has data-parallel ranks, or none, beside the best of the other kind."""
    has_ranks = best.layout.data_parallel_size > 1
    others = [one for one in deployments if (one.layout.data_parallel_size > 1) != has_ranks]
    if not others:
        return []
    other = max(others, key=lambda one: (one.meets, one.tokens_per_s))
    why = (
        "Data-parallel ranks: each keeps the cache of its own requests alone, and fewer ranks share an all-reduce."
        if has_ranks
        else "No data-parallel ranks: each reads all weights but the experts in every step, sends its tokens to the "
        "experts of the others, and waits for the slowest."
    )
    late = "" if other.meets else f", which misses {target}"
    figures = "; ".join(
        f"{one}: {one.replicas * int(one.estimate.batch):,} requests at once, communication takes "
        f"{100 * one.estimate.expected.causes['communication']:.0f} % of the time"
        for one in (best, other)
    )
    return [f"{why} {figures}{late}.", _EVEN_EXPERTS]


def _unmet_target_text(deployments: list[Deployment], target: SpeedTarget) -> str:
    """Return the deployment nearest to a target that none meets, and what would be faster."""

    def excess(deployment: Deployment) -> float:
        speed = deployment.estimate.expected
        return max(speed.tpot_s / (target.tpot_s or math.inf), speed.ttft_s / (target.ttft_s or math.inf))

    nearest = min(deployments, key=excess)
    speed, ideal = nearest.estimate.expected, nearest.estimate.ideal
    batch = nearest.estimate.traffic.concurrency
    if target.ttft_s is not None and speed.ttft_s > target.ttft_s:
        helps = "shorter prompts (--input-tokens), an accelerator with more FLOP/s"
    else:
        helps = "an accelerator with faster memory, fewer bits a weight (--quantization fp8)"
    return (
        f"no layout reaches {target}: the nearest is {nearest} with {1000 * speed.tpot_s:.1f} ms between tokens "
        f"(ideally {1000 * ideal.tpot_s:.1f}) and {1000 * speed.ttft_s:.0f} ms to the first (ideally "
        f"{1000 * ideal.ttft_s:.0f}), {batch} in flight; use {helps}, or a looser target."
    )


def _deployments(
    inputs: PlanInputs, traffic: Traffic, target: SpeedTarget, measured: MeasuredHere | None
) -> tuple[list[Deployment], list[Candidate]]:
    """Return (deployments, layouts that hold less than one request), on the fewest nodes that have a deployment."""
    cluster = inputs.cluster
    found: list[Deployment] = []
    small: list[Candidate] = []
    for nodes in [cluster.num_nodes] if cluster.num_nodes else _NODES:
        for layout, replicas in _even_deployments(inputs, nodes):
            candidate = inputs.evaluate(layout)
            if candidate.memory is None or not candidate.memory.holds(1):
                small.append(candidate)
                continue
            roofline = Roofline(inputs.model, cluster.accelerator, inputs.engine_for(layout), layout, measured)
            speeds = ReplicaSpeeds(roofline=roofline, traffic=traffic, memory=candidate.memory)
            best = _best_batch(speeds, target, replicas)
            found.append(Deployment(replicas=replicas, estimate=best, meets=target.is_met(best)))
        if found:
            break
    return found, small


def _even_deployments(inputs: PlanInputs, nodes: int) -> Iterator[tuple[Layout, int]]:
    """Yield (layout, replicas) that fill so many nodes evenly, with engines over all nodes, over some, or within one.

    There are no more stages than nodes. `_few_stages_text` says why.
    """
    cluster, engine = inputs.cluster, inputs.engine
    asked = engine.has_asked_layout
    is_tpu = cluster.accelerator.kind == "tpu"  # its links span hosts
    shares_experts = bool(inputs.model.num_experts) and cluster.accelerator.kind == "gpu"
    for used in (count for count in range(nodes, 0, -1) if nodes % count == 0):
        data = data_parallel_layouts(used, cluster, engine) if shares_experts else ()
        for layout in (*layouts_on(used, cluster, engine), *data):
            copies, rest = divmod(nodes * cluster.node_size_of(nodes), layout.num_gpus)
            if asked or (rest == 0 and layout.pipeline_parallel_size <= (1 if is_tpu else used)):
                yield layout, copies


def _best_batch(replica: ReplicaSpeeds, target: SpeedTarget, replicas: int) -> SpeedEstimate:
    """Return the estimate at the largest batch that meets the target, or at the traffic's concurrency where it is above
    1."""
    if replica.traffic.concurrency > 1:
        return replica.at(-(-replica.traffic.concurrency // replicas))
    least, most = 1, replica.held()
    if target.is_met(largest := replica.at(most)):
        return largest
    if not target.is_met(smallest := replica.at(least)):
        return smallest
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if target.is_met(replica.at(middle)) else (least, middle)
    return replica.at(least)


def _reasons(met: list[Deployment], missed: list[Deployment], small: list[Candidate], target: SpeedTarget) -> list[str]:
    best = met[0]
    speed = best.estimate.expected
    reasons = [
        f"For {target}: {best}, {best.tokens_per_s:,.0f} tokens/s in all, {1000 * speed.tpot_s:.1f} ms between tokens "
        f"with {best.estimate.traffic.concurrency} requests in flight in each; bound by {best.estimate.speed.bound}."
    ]
    if (measured := best.estimate.measured) is not None:
        reasons.append(
            f"This speed is corrected by {measured.runs} runs that were measured here (× {measured.ratio:.2g}), the "
            "others as far as those runs are near them."
        )
    for other in met[1:4]:
        share = other.tokens_per_s / best.tokens_per_s
        reasons.append(
            f"Not {other}: {other.tokens_per_s:,.0f} tokens/s ({100 * share:.0f} %) at "
            f"{other.estimate.traffic.concurrency} in flight in each; {_time_text(other)}."
        )
    for other in missed[:2]:
        late = 1000 * other.estimate.expected.tpot_s
        reasons.append(f"Not {other}: {late:.1f} ms between tokens; {_time_text(other)}.")
    reasons += [f"Not {candidate.layout}: {candidate.reason}." for candidate in small if candidate.memory][:2]
    return reasons


def _time_text(deployment: Deployment) -> str:
    """Name the main limit of a deployment, and on several GPUs the share of communication."""
    if deployment.layout.num_gpus == 1:
        return f"bound by {deployment.estimate.speed.bound}"
    share = 100 * deployment.estimate.expected.causes["communication"]
    return f"bound by {deployment.estimate.speed.bound}, communication takes {share:.0f} %"
