"""Prints outcomes: a table for people, with the losses that are known by name and those that are not."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.expected import KNOWN, missed, surpasses
from tests.faults.outcomes import Outcome

COLUMNS = ("sent", "answered", "resumed", "repeated", "reported", "needless", "lost")
TIMES = (("noticed", "notice_s"), ("recovered", "recover_s"), ("gap", "gap_s"))


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each fault: counts, seconds after the fault (`gap`: a client's longest wait), and the goals."""
    head = ["fault", *COLUMNS, *(f"{title} s" for title, _ in TIMES), ""]
    rows = [head, *map(_row, outcomes)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head) - 1)]

    def line(name: str, *cells: str) -> str:
        *numbers, verdict = cells
        aligned = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        return "  ".join([name.ljust(widths[0]), *aligned, verdict]).rstrip()

    return "\n".join(line(*row) for row in rows)


def _row(outcome: Outcome) -> list[str]:
    counts = [str(getattr(outcome, column)) for column in COLUMNS]
    times = [_seconds(getattr(outcome, name)) for _, name in TIMES]
    misses = missed(outcome)
    verdict = "WORSE than known" if surpasses(outcome) else f"known, goals missed: {misses}" if misses else "goals met"
    return [outcome.fault, *counts, *times, verdict]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def remarks(outcomes: Sequence[Outcome]) -> str:
    """Below the table: for each fault with losses the reasons, whether they are known, and what is met by now."""
    lines = []
    for outcome in outcomes:
        known = KNOWN.get(outcome.fault)
        if over := surpasses(outcome):
            lines.append(f"{outcome.fault}: WORSE than known: {over}")
        elif known is not None and (outcome.lost or outcome.needless):
            lines.append(f"{outcome.fault}: known: {known.why}")
        elif known is not None:
            lines.append(f"{outcome.fault}: nothing lost this time, though known: {known.why}")
        lines += [f"    {number} x {reason}" for reason, number in outcome.reasons.items()]
    return "\n".join(lines)
