"""How much nearer speeds are that count two runs of the same site: `python -m benchmarks.accuracy.speed_learned`.

A published source stands for a site. Each of its rows is predicted by the factors fitted on all other sources, and then
corrected by two other rows of the source on the same accelerator, for each pair of them. Writes
docs/evidence/learned.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.accuracy.speed_accuracy import every_case, scored_rows
from benchmarks.accuracy.speed_case import Case
from benchmarks.accuracy.speed_scores import leave_one_out
from hpc_serve.plan.speed.estimate import case_of, speed_range
from hpc_serve.plan.speed.measured import MeasuredHere, MeasuredRun, deviation

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "learned.md"
STEPS = ((0, 0.5), (0.5, 1.5), (1.5, 2.5), (2.5, 3.5), (3.5, 5.5), (5.5, 8.5), (8.5, math.inf))
HEAD = """\
# What runs of a site teach

<!-- not run: minutes -->
```bash
python -m benchmarks.accuracy.speed_learned    # writes this page
```

A published source stands for a site. Each of its rows is predicted by the factors fitted on all other sources, and then
corrected by other rows of the same source on the same accelerator. [The plan](../design/plan.md) has the rule.

## How far two rows of a site are apart

A step is a doubling of a number, or a word that differs. The figures are natural logarithms of measured / printed. The
last column is what the rule assumes.
"""
TAUGHT = """
## Rows corrected by two others of their site

By the steps to the nearer of the two. Errors are medians over sites of a site's median. "One is wrong" halves one of
the two runs, as other programs on the cores do. The share of rows in the printed range is a mean over sites. A width is
the upper end of the range by its lower.
"""


@dataclass(frozen=True)
class Row:
    """A published row with its printed speed, as a run of its site."""

    case: Case
    run: MeasuredRun

    @property
    def site(self) -> tuple[str, str]:
        """Its source and accelerator."""
        return self.case.source, self.run.case.accelerator


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A row before and after two runs. `steps` to the nearer of them; `held` by the range and its `width`."""

    site: tuple[str, str]
    steps: float
    before: float
    after: float
    wrong: float
    held: tuple[bool, bool]
    width: tuple[float, float]


def rows_of() -> list[Row]:
    """All rows of vLLM that are compared."""
    found = []
    for case, factors in scored_rows(leave_one_out(every_case())):
        assert case.roofline
        assert case.traffic
        of = case_of(case.roofline, case.traffic, case.batch)
        run = MeasuredRun(case=of, tokens_per_s=case.measured, printed_tokens_per_s=case.tokens_per_s(factors))
        found.append(Row(case, run))
    return found


def differences(rows: Sequence[Row]) -> list[list[str]]:
    """By steps: how far the logarithms of measured / printed of two rows of a site are apart."""
    found = [["steps apart", "pairs", "root mean square", "deviation(steps)"]]
    pairs = [
        (one.run.case.steps(other.run.case), one.run.log_ratio - other.run.log_ratio)
        for one, other in itertools.combinations(rows, 2)
        if one.site == other.site
    ]
    for low, high in STEPS:
        there = [(steps, apart) for steps, apart in pairs if low <= steps < high]
        root = math.sqrt(statistics.fmean(apart**2 for _, apart in there))
        usual = deviation(statistics.fmean(steps for steps, _ in there))
        words = f"{low:g} to {high:g}" if high < math.inf else f"{low:g} and more"
        found.append([words, str(len(there)), f"{root:.2f}", f"{usual:.2f}"])
    return found


def learned(rows: Sequence[Row]) -> Iterator[Learned]:
    """Each row with each pair of other rows of its site, where its class has a range."""
    for row in rows:
        roofline, traffic, truth = row.case.roofline, row.case.traffic, row.run.log_ratio
        assert roofline
        assert traffic
        published = speed_range(roofline, traffic)
        if published is None:
            continue
        low, high = bounds = published["measured_by_printed"]
        others = [one for one in rows if one.site == row.site and one is not row]
        for pair in itertools.permutations(others, 2):
            runs = [one.run for one in pair]
            halved = replace(runs[0], tokens_per_s=runs[0].tokens_per_s / 2)
            here, wrong = (
                MeasuredHere(both, row.site[1]).correction(row.run.case, bounds) for both in (runs, [halved, runs[1]])
            )
            shift = math.log(here.ratio) if here else 0.0
            after = here.bounds if here else (low, high)
            yield Learned(
                site=row.site,
                steps=min(run.case.steps(row.run.case) for run in runs),
                before=abs(truth),
                after=abs(truth - shift),
                wrong=abs(truth - (math.log(wrong.ratio) if wrong else 0.0)),
                held=(low <= math.exp(truth) <= high, after[0] <= math.exp(truth - shift) <= after[1]),
                width=(high / low, after[1] / after[0]),
            )


def table_of(found: Sequence[Learned]) -> list[list[str]]:
    """By the steps to the nearer run: errors in per cent, rows in the range, its width. Each site counts once."""
    head = ["steps to the nearer run", "sites", "error before", "after", "after, one is wrong"]
    lines = [[*head, "in the range before", "after", "width before", "after"]]
    for low, high in (*STEPS, (0, math.inf)):
        sites: dict[tuple[str, str], list[Learned]] = {}
        for one in found:
            if low <= one.steps < high:
                sites.setdefault(one.site, []).append(one)
        if not sites:
            continue
        errors = [
            statistics.median(statistics.median(getattr(one, name) for one in ones) for ones in sites.values())
            for name in ("before", "after", "wrong")
        ]
        held = [
            statistics.fmean(statistics.fmean(one.held[n] for one in ones) for ones in sites.values()) for n in (0, 1)
        ]
        widths = [
            statistics.median(statistics.median(one.width[n] for one in ones) for ones in sites.values())
            for n in (0, 1)
        ]
        words = (
            "all"
            if (low, high) == (0, math.inf)
            else f"{low:g} to {high:g}"
            if high < math.inf
            else f"{low:g} and more"
        )
        lines.append(
            [
                *(words, str(len(sites))),
                *(f"{100 * math.expm1(one):.0f} %" for one in errors),
                *(f"{100 * share:.0f} %" for share in held),
                *(f"{width:.2f}" for width in widths),
            ]
        )
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def page(rows: Sequence[Row]) -> str:
    """The page's text."""
    parts = [HEAD, *markdown(differences(rows)), TAUGHT, *markdown(table_of(list(learned(rows))))]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    text = page(rows_of())
    PAGE.write_text(text, encoding="utf-8")
    print(text)
