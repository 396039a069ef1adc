"""What other tools said beside the truth and ours: every row, and how near each tool is by figure.

A tool is compared with ours on the rows that both answer, so that the rows that a tool refuses do not count for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.other_tools.questions import FIGURES, Row

OURS = "hpc-serve"
NAMES = {
    "weights": "weights of a GPU, GiB",
    "cache": "KV cache of a GPU, GiB",
    "token": "cache of a GPU for one token, bytes",
    "speed": "output tokens per second",
}
NEAR_PER_CENT = 25


@dataclass(frozen=True, kw_only=True)
class Tool:
    """What a tool said: answers by row, the version that was asked, and when."""

    name: str
    version: str
    date: str
    answers: Mapping[str, Mapping[str, Any]]

    def figure(self, row: Row, name: str) -> float | None:
        """What it says of a figure of a row; None where it has no answer."""
        value = self.answers.get(row.id, {}).get(name)
        return float(value) if value is not None else None

    def error(self, row: Row, name: str) -> float | None:
        """Relative error of a figure, in per cent."""
        value = self.figure(row, name)
        return None if value is None or name not in row.truth else _error(value, row.truth[name])


def _error(value: float, truth: float) -> float:
    return 100 * (value / truth - 1)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How near a tool and ours are on the rows that it answers, in per cent, and how many rows there are in all."""

    tool: str
    figure: str
    rows: int
    answered: int
    median: float
    ninetieth: float
    near: int
    our_median: float
    our_ninetieth: float
    our_near: int


def summaries(rows: Sequence[Row], tools: Sequence[Tool]) -> list[Summary]:
    """Of each figure and each tool that has any answer to it."""
    found = []
    for figure in FIGURES:
        asked = [row for row in rows if figure in row.truth]
        for tool in tools:
            pairs = [
                (abs(error), abs(_error(row.ours[figure], row.truth[figure])))
                for row in asked
                if (error := tool.error(row, figure)) is not None
            ]
            if pairs:
                found.append(_summary(tool.name, figure, len(asked), *zip(*pairs, strict=True)))
    return found


def _summary(tool: str, figure: str, rows: int, theirs: Sequence[float], ours: Sequence[float]) -> Summary:
    return Summary(
        tool=tool,
        figure=figure,
        rows=rows,
        answered=len(theirs),
        median=statistics.median(theirs),
        ninetieth=ninetieth(theirs),
        near=sum(one <= NEAR_PER_CENT for one in theirs),
        our_median=statistics.median(ours),
        our_ninetieth=ninetieth(ours),
        our_near=sum(one <= NEAR_PER_CENT for one in ours),
    )


def ninetieth(values: Sequence[float]) -> float:
    """The least value that nine tenths of the values do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def verdicts(rows: Sequence[Row], tools: Sequence[Tool]) -> list[str]:
    """Lines: whether a tool says "fits" of what vLLM refused, or the other way round. Without those that never say."""
    lines = []
    ours = {row.id: {"fits": row.fits} for row in rows}
    for tool in (Tool(name=OURS, version="", date="", answers=ours), *tools):
        said = [(row, tool.answers.get(row.id, {}).get("fits")) for row in rows if row.ran is not None]
        known = [(row, bool(fits)) for row, fits in said if fits is not None]
        if known:
            wrong_yes = sum(fits and not row.ran for row, fits in known)
            wrong_no = sum(row.ran is True and not fits for row, fits in known)
            lines.append(
                f"{tool.name}: of {len(known)} verdicts {wrong_yes} say that it fits where vLLM refused, "
                f"{wrong_no} that it does not where it ran"
            )
    return lines


def table(rows: Sequence[Row], tools: Sequence[Tool]) -> str:
    """The whole as text: rows by figure, then the summaries, the verdicts and what was not asked."""
    lines = [f"{tool.name} {tool.version}, asked {tool.date}" for tool in tools]
    for figure in FIGURES:
        shown = [row for row in rows if figure in row.truth]
        able = [tool for tool in tools if any(tool.figure(row, figure) is not None for row in shown)]
        lines += ["", NAMES[figure], f"{'row':44} {'truth':>10} {OURS:>20} {_heads(able)}"]
        lines += [_line(row, figure, able) for row in shown]
    lines += ["", *summary_lines(summaries(rows, tools)), "", *verdicts(rows, tools), ""]
    return "\n".join([*lines, *_unanswered(rows, tools)])


def _heads(tools: Sequence[Tool]) -> str:
    return " ".join(f"{tool.name:>20}" for tool in tools)


def _line(row: Row, figure: str, tools: Sequence[Tool]) -> str:
    truth = row.truth[figure]
    cells = [_cell(row.ours[figure], truth), *(_cell(tool.figure(row, figure), truth) for tool in tools)]
    return f"{row.id[:44]:44} {_number(truth):>10} " + " ".join(f"{cell:>20}" for cell in cells)


def _cell(value: float | None, truth: float) -> str:
    return "-" if value is None else f"{_number(value)} {_error(value, truth):+7.1f}%"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def summary_lines(found: Sequence[Summary]) -> list[str]:
    """A table for people: absolute errors in per cent on the rows that a tool answers, and ours on the same rows."""
    head = f"{'figure':10} {'tool':16} {'answered':>9} {'median':>8} {'90th':>8} {'within a quarter':>17}"
    lines = [f"{head}   {OURS} on the same rows: median, 90th, within a quarter"]
    for one in found:
        lines.append(
            f"{one.figure:10} {one.tool:16} {f'{one.answered}/{one.rows}':>9} {one.median:7.2f}% {one.ninetieth:7.1f}% "
            f"{one.near:>17}   {one.our_median:7.2f}% {one.our_ninetieth:7.1f}% {one.our_near:>6}"
        )
    return lines


def _unanswered(rows: Sequence[Row], tools: Sequence[Tool]) -> Iterator[str]:
    for tool in tools:
        why: dict[str, list[str]] = {}
        for row in rows:
            answer = tool.answers.get(row.id, {"not_asked": "it was not asked"})
            words = answer.get("not_asked") or ("it refuses: " + answer["refused"] if "refused" in answer else None)
            if words:
                why.setdefault(words.splitlines()[0][:150], []).append(row.id)
        yield f"{tool.name}: no answer"
        for words, ids in why.items():
            yield f"  {len(ids):3} {'row' if len(ids) == 1 else 'rows'}: {words}"
