"""Remarks beside the figures of a run: this program was the limit, or the requests were not as asked for."""

from __future__ import annotations

from collections import Counter

from hpc_serve.bench.outcome import Run

MOST_BUSY = 0.8
MOST_LATE_S = 0.02
_MOST_ERRORS = 3


def notes_on(run: Run) -> list[str]:
    """Sentences, the gravest first."""
    return [*_interruption(run), *_own_share(run), *_lengths(run), *_failures(run), *_resent(run)]


def _interruption(run: Run) -> list[str]:
    if not run.interrupted:
        return []
    return [
        f"The run was interrupted: {len(run.outcomes)} of {len(run.requests)} requests had ended. The figures are of "
        "these."
    ]


def _own_share(run: Run) -> list[str]:
    busy, late_s = run.own_share.busy, run.own_share.late_s
    if busy >= MOST_BUSY:
        return [
            f"This program was busy {busy:.0%} of the time: the figures are its own, and the service may be faster. "
            "Run it on several nodes at once, each with a part of the load."
        ]
    if late_s >= MOST_LATE_S:
        return [
            f"One time in twenty this program woke {1e3 * late_s:.0f} ms late or later, though it was busy {busy:.0%} "
            "of the time: other programs use this machine's cores, and times are too long by as much. Run it on a "
            "quieter node."
        ]
    return []


def _lengths(run: Run) -> list[str]:
    """Name answers and prompts that are longer or shorter than asked for."""
    notes = []
    asked = [(run.requests[outcome.place], outcome) for outcome in run.outcomes if outcome.is_answered]
    wrong = [
        outcome.input_len - ask.input_len for ask, outcome in asked if ask.input_len not in (None, outcome.input_len)
    ]
    if wrong:
        notes.append(
            f"{len(wrong)} of {len(asked)} prompts are not as long as asked for: from {min(wrong):+d} to "
            f"{max(wrong):+d} tokens."
        )
    must = [(ask, outcome) for ask, outcome in asked if ask.body.get("ignore_eos")]
    short = [outcome.output_len - ask.output_len for ask, outcome in must if outcome.output_len != ask.output_len]
    if short:
        notes.append(
            f"{len(short)} of {len(must)} answers are not as long as asked for: from {min(short):+d} to "
            f"{max(short):+d} tokens. Does the service's --max-model-len leave room for them?"
        )
    return notes


def _failures(run: Run) -> list[str]:
    """Why requests failed, the most frequent cause first."""
    causes = Counter(outcome.error for outcome in run.outcomes if not outcome.is_answered)
    notes = [f"{count} failed: {error}" for error, count in causes.most_common(_MOST_ERRORS)]
    if (others := len(causes) - _MOST_ERRORS) > 0:
        notes.append(f"Requests failed for {others} more reasons: --save FILE --detailed keeps them all.")
    return notes


def _resent(run: Run) -> list[str]:
    again = sum(outcome.sent > 1 for outcome in run.outcomes)
    if not again:
        return []
    were = "1 request was" if again == 1 else f"{again} requests were"
    return [f"{were} sent to another replica after the first, as by any client, and the time that it took counts."]
