"""Remarks beside the figures of a run: this program was the limit, or the requests were not as asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpc_serve.bench.run import Run

MOST_BUSY = 0.8
MOST_LATE_S = 0.02
_MOST_ERRORS = 3
_MOST_WAITING = 0.25
_OTHERS_SHARE = 0.01
"""Of the run's tokens: an engine counts the last tokens of the run before a moment late."""


def notes_on(run: Run, wrong: Mapping[int, str]) -> list[str]:
    """Return sentences, the gravest first. `wrong` are the faults of answers, by the place of the request."""
    return [*_program(run), *_others(run), *_lengths(run), *_failures(run), *_answers(run, wrong)]


def _program(run: Run) -> Iterator[str]:
    """Say that the run was interrupted, or that this program was the limit."""
    if run.interrupted:
        yield (
            f"The run was interrupted: {len(run.outcomes)} of {len(run.requests)} requests had ended. The figures are "
            "of these."
        )
    busy, late_s = run.busy, run.late_s
    if busy >= MOST_BUSY:
        yield (
            f"This program was busy {busy:.0%} of the time: the figures are its own, and the service may be faster. "
            "Run it on several nodes at once, each with a part of the load."
        )
    elif late_s >= MOST_LATE_S:
        yield (
            f"One time in twenty this program woke {1e3 * late_s:.0f} ms late or later, though it was busy {busy:.0%} "
            "of the time: other programs use this machine's cores, and times are too long by as much. Run it on a "
            "quieter node."
        )


def _others(run: Run) -> Iterator[str]:
    """Say that others used the engines, or the cores beside them."""
    own = sum(outcome.output_len for outcome in run.outcomes)
    if run.others_tokens is not None and run.others_tokens > _OTHERS_SHARE * own:
        yield (
            f"The engines generated {run.others_tokens:,.0f} tokens for other requests meanwhile, and {own:,} for "
            "these: alone, the service is faster."
        )
    if run.waited is not None and run.waited > _MOST_WAITING:
        yield (
            f"An engine is on this node, where programs waited for a core {run.waited:.0%} of the time: it may be "
            "faster where it has its cores alone."
        )


def _lengths(run: Run) -> Iterator[str]:
    """Name answers and prompts that are longer or shorter than asked for."""
    asked = [(run.requests[outcome.place], outcome) for outcome in run.outcomes if outcome.is_answered]
    prompts = [outcome.input_len - ask.input_len for ask, outcome in asked if ask.input_len is not None]
    if any(prompts):
        yield _off("prompts", prompts, len(asked))
    answers = [outcome.output_len - ask.output_len for ask, outcome in asked if ask.body.get("ignore_eos")]
    if any(answers):
        words = _off("answers", answers, len(answers))
        yield f"{words} Does the service's --max-model-len leave room for them?"


def _off(what: str, differences: Sequence[int], count: int) -> str:
    wrong = [one for one in differences if one]
    span = f"from {min(wrong):+d} to {max(wrong):+d} tokens"
    return f"{len(wrong)} of {count} {what} are not as long as asked for: {span}."


def _failures(run: Run) -> Iterator[str]:
    """Yield why requests failed, the most frequent cause first."""
    causes = Counter(outcome.error for outcome in run.outcomes if not outcome.is_answered)
    yield from (f"{count} failed: {error}" for error, count in causes.most_common(_MOST_ERRORS))
    if (others := len(causes) - _MOST_ERRORS) > 0:
        yield f"Requests failed for {others} more reasons: --save FILE --detailed keeps them all."


def _answers(run: Run, wrong: Mapping[int, str]) -> Iterator[str]:
    """Say which answers came from a further replica, and which are wrong."""
    if again := sum(outcome.sent > 1 for outcome in run.outcomes):
        were = "1 request was" if again == 1 else f"{again} requests were"
        yield f"{were} sent to another replica after the first, as by any client, and the time that it took counts."
    if wrong:
        yield f"{len(wrong)} answers are wrong by --check, the first: {wrong[min(wrong)]}"
