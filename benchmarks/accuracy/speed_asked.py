"""Asks `plan` about every published measurement as a person would: `python -m benchmarks.accuracy.speed_asked`.

Each row becomes the options of a plan: sizes, lengths, requests at once, arrivals. What is printed for it is compared
with what was measured, and with what speed_cases.py scores.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.speed_accuracy import ENGINE, WITHIN_PER_CENT
from benchmarks.accuracy.speed_case import Case
from benchmarks.accuracy.speed_cases import load
from benchmarks.accuracy.speed_cases_later import load_later
from hpc_serve.errors import HpcServeError
from hpc_serve.plan import ClusterSpec, Workload
from hpc_serve.plan.make import FoundParts, PlanRequest, PlanResult, make_plan
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.plan.speed.step import EXPECTED


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `plan` says of a row. `estimate` is the line of its table for that many requests. None: it refuses.

    `held_all`: the cache holds all requests at once.
    """

    case: Case
    estimate: SpeedEstimate | None
    held_all: bool = False
    refusal: str | None = None

    @property
    def error(self) -> float:
        """Relative error of the printed tokens per second, in per cent."""
        assert self.estimate
        return 100 * (self.case.replicas * self.estimate.expected.output_tokens_per_s / self.case.measured - 1)


def ask(case: Case) -> Answer:
    """Have the plan made for a row."""
    assert case.traffic
    try:
        result = _plan(case)
        chosen = result.chosen
    except HpcServeError as error:
        return Answer(case=case, estimate=None, refusal=str(error))
    found = {one.traffic.concurrency: one for one in result.estimates()}
    return Answer(case=case, estimate=found[case.traffic.concurrency], held_all=not chosen.suggestions)


def _plan(case: Case) -> PlanResult:
    roofline, traffic = case.roofline, case.traffic
    assert roofline
    assert traffic
    layout = roofline.layout
    engine = replace(
        roofline.engine,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        data_parallel_size=layout.data_parallel_size,
    )
    asked = PlanRequest(
        model=roofline.model.name,
        engine=engine,
        workload=Workload(max_model_len=case.max_model_len, concurrency=traffic.concurrency),
        input_tokens=traffic.input_tokens,
        output_tokens=traffic.output_tokens,
        longest_output_tokens=traffic.longest_output_tokens,
        arrivals=traffic.arrivals,
    )
    cluster = ClusterSpec(
        accelerator=roofline.accelerator, num_nodes=layout.num_nodes, gpus_per_node=layout.gpus_per_node
    )
    return make_plan(asked, FoundParts(model=roofline.model, cluster=cluster))


def answers(cases: Sequence[Case]) -> list[Answer]:
    """The answers to all rows of vLLM that are scored."""
    return [ask(one) for one in cases if not one.left_out and one.engine.startswith(ENGINE)]


def summary(found: Sequence[Answer]) -> list[str]:
    """Lines for people: how many were answered, how near the answers are, and those whose requests wait."""
    answered = [one for one in found if one.estimate]
    lines = [f"answered {len(answered)} of {len(found)}"]
    lines += [f"  refused: {one.case.id}: {one.refusal}" for one in found if one.refusal]
    for title, group in (
        ("the cache holds all requests", [one for one in answered if one.held_all]),
        ("requests wait", [one for one in answered if not one.held_all]),
    ):
        errors = [abs(one.error) for one in group]
        within = sum(value <= WITHIN_PER_CENT for value in errors)
        lines.append(
            f"{title}: {len(group)} rows, median error {statistics.median(errors):.1f} %, within a quarter {within}"
        )
    return lines


def differing(found: Sequence[Answer]) -> list[str]:
    """Rows of which another figure is printed than is scored (to a thousandth), and both.

    A run of few rounds is scored as a burst, of which so many run at once.
    """
    lines = []
    for one in found:
        if one.estimate is None or one.case.has_few_rounds:
            continue
        printed, scored = one.case.replicas * one.estimate.expected.output_tokens_per_s, one.case.tokens_per_s(EXPECTED)
        if abs(printed / scored - 1) > 1e-3:
            lines.append(f"  {one.case.id}: {printed:,.0f} printed, {scored:,.0f} scored")
    return lines


def main() -> None:
    """Print what was answered."""
    found = answers([*load(), *load_later()])
    print("\n".join(summary(found)))
    different = differing(found)
    print(f"printed as scored: {len(found) - len(different)} of {len(found)}")
    print("\n".join(different))


if __name__ == "__main__":
    main()
