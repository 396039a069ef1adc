"""Prints outcomes: a table for people, with the losses that are known by name and those that are not."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.expected import KNOWN, SLOW, missed, surpasses
from tests.faults.outcomes import Outcome

COLUMNS = ("sent", "answered", "resumed", "repeated", "reported", "needless", "lost")
TIMES = (
    ("noticed", "notice_s"),
    ("recovered", "recover_s"),
    ("gap", "gap_s"),
    ("left", "left_s"),
    ("longer", "longer_s"),
)
_TITLES = (*COLUMNS, *(f"{title} s" for title, _ in TIMES), "ready")
_NAME_WIDTH = 23
NOTABLE_QUEUE_S = 0.5


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each fault: counts, times in seconds, and the goals. LEGEND says what each column means."""
    return "\n".join([HEAD, *map(line, outcomes)])


def comparison(outcomes: Sequence[Outcome]) -> str:
    """The same of another program, of which nothing is expected; below each line, why requests were not answered."""
    lines = [HEAD]
    for outcome in outcomes:
        lines.append(_aligned(*_row(outcome)[:-1], "NOT MEASURED" if outcome.broken else ""))
        lines += [f"    {number} x {reason}" for reason, number in outcome.reasons.items()]
        lines += outcome.broken.splitlines()
    return "\n".join(lines)


def line(outcome: Outcome) -> str:
    """The line of one fault, below HEAD."""
    return _aligned(*_row(outcome))


def _aligned(name: str, *cells: str) -> str:
    *numbers, verdict = cells
    aligned = [cell.rjust(len(title)) for cell, title in zip(numbers, _TITLES, strict=True)]
    return "  ".join([name.ljust(_NAME_WIDTH), *aligned, verdict]).rstrip()


def _row(outcome: Outcome) -> list[str]:
    counts = [str(getattr(outcome, column)) for column in COLUMNS]
    times = [_seconds(getattr(outcome, name)) for _, name in TIMES]
    if outcome.broken:
        return [outcome.fault, *counts, *times, "-", "NOT MEASURED"]
    misses = missed(outcome)
    is_known = outcome.fault in KNOWN or outcome.fault in SLOW
    said = f"{'known, ' if is_known else ''}goals missed: {misses}" if misses else "goals met"
    verdict = "WORSE than known" if surpasses(outcome) else said
    return [outcome.fault, *counts, *times, f"{outcome.ready}/{outcome.ready_due}", verdict]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


HEAD = _aligned("fault", *_TITLES, "")
LEGEND = """\
answered: by one replica; resumed: a begun stream went on at another; repeated: from its beginning; reported: by a typed
error; needless: of these, where better was possible; lost: a wrong answer, none, or an error without a type.
noticed, recovered: from the fault to the begin and the end of the last request that was affected. (Of a link that comes
and goes, no new program can know before its own request: there its gap counts, and it does not count as noticed late.)
gap: the longest that a client had no sign of an answer beyond what an unbroken one takes: between two pieces of a
stream; for an answer that comes whole, from the fault (or from the request, if later) to the answer, less the time
that an unbroken one of its length takes. Time in the queue of a full engine that then began it is left out.
left: the longest time, from the fault or the begin of a request, until it was begun at another replica.
longer: the most that an answer took in all beyond an unbroken one; a whole answer begins anew, so this counts what
it had spent before. ready: replicas that were ready afterwards, of those that should be."""


def remarks(outcomes: Sequence[Outcome]) -> str:
    """Below the table: for each fault with losses the reasons, whether they are known, and what is met by now."""
    lines = []
    for outcome in outcomes:
        if outcome.broken:
            lines.append(f"{outcome.fault}: nothing was measured:\n{outcome.broken}")
            continue
        known = KNOWN.get(outcome.fault)
        if over := surpasses(outcome):
            lines.append(f"{outcome.fault}: WORSE than known: {over}")
        elif known is not None and (outcome.lost or outcome.needless):
            lines.append(f"{outcome.fault}: known: {known.why}")
        elif known is not None:
            lines.append(f"{outcome.fault}: nothing lost this time, though known: {known.why}")
        if missed(outcome) and outcome.fault in SLOW:
            lines.append(f"{outcome.fault}: slow, as known: {SLOW[outcome.fault]}")
        if outcome.queued_s >= NOTABLE_QUEUE_S:
            lines.append(f"{outcome.fault}: up to {outcome.queued_s:.1f} s in the queue of a full engine, in no gap")
        lines += [f"    {number} x {reason}" for reason, number in outcome.reasons.items()]
        if outcome.note:
            lines.append(f"{outcome.fault}: {outcome.note}")
        if outcome.unwell:
            lines.append(f"    repaired after {outcome.fault}: {outcome.unwell}")
    return "\n".join(lines)
