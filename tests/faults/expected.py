"""What each fault may cost today, as data, beside the goals: nothing lost, nothing reported without need.

A fault that is not named in KNOWN must lose nothing, and leave its replicas ready. `lost` and `needless` are the most
that is accepted today; None is any number. Tighten an entry when the product becomes better, and remove it when nothing
is lost any more. The goals for times are printed, with why they are not met where that is known (SLOW), and no run
fails by them: a loaded machine is slow by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Known:
    """A loss that is known: how many requests and replicas it may cost, and why."""

    lost: int | None = 0
    needless: int | None = 0
    replicas: int = 0
    why: str


NOTICED_S = 10.0
GAP_S = 2.0
# A network that loses packets lets some signs through.
LOSSY_GAP_S = {"link-flaps": 5.0}
# A client that stands still for a while sees a gap of that length, whatever the service does.
NO_GAP_GOAL = ("client-frozen", "healthy-pair")
# Nothing breaks in these, so no request may leave its replica. `healthy-pair` has steps of 20 s: a gap is no fault.
HEALTHY = ("nothing", "healthy-pair")


KNOWN: dict[str, Known] = {}

_LATE = "a late link ends no signs: a request leaves only if a pause is longer than 1.5 s"
_REPEATED_LATE = "an answer of 48 s that is not a stream begins anew when Slurm kills what is left after 30 s"

# The goals for times that are known not to be met, and why. No run fails by them.
SLOW: dict[str, str] = {
    "link-slow": _LATE,
    "scancel-long-streams": _REPEATED_LATE,
}

NOTHING = Known(why="")


def surpasses(outcome: Outcome) -> str:
    """What of an outcome is more than what is known, in words; "" if nothing is."""
    known = KNOWN.get(outcome.fault, NOTHING)
    over = ["nothing was measured"] if outcome.broken else []
    if known.lost is not None and outcome.lost > known.lost:
        over.append(f"{outcome.lost} lost, at most {known.lost} expected")
    if known.needless is not None and outcome.needless > known.needless:
        over.append(f"{outcome.needless} needlessly reported, at most {known.needless} expected")
    if outcome.ready < outcome.ready_due - known.replicas:
        over.append(
            f"{outcome.ready} replicas ready afterwards, at least {outcome.ready_due - known.replicas} expected"
        )
    if outcome.fault in HEALTHY and (moved := outcome.resumed + outcome.repeated):
        over.append(f"{moved} requests left a healthy replica")
    if outcome.unwell:
        over.append(f"afterwards not well: {outcome.unwell}")
    return "; ".join(over)


def missed(outcome: Outcome) -> str:
    """Which goals an outcome does not meet, in words; "" if it meets all."""
    most_gap_s = LOSSY_GAP_S.get(outcome.fault, GAP_S)
    goals = (
        (outcome.lost, 0, f"{outcome.lost} lost"),
        (outcome.needless, 0, f"{outcome.needless} needlessly reported"),
        (outcome.ready_due - outcome.ready, 0, f"{outcome.ready} of {outcome.ready_due} replicas ready afterwards"),
        (
            None if outcome.fault in HEALTHY else outcome.notice_s,
            NOTICED_S,
            f"noticed after {outcome.notice_s or 0:.1f} s",
        ),
        (None if outcome.fault in NO_GAP_GOAL else outcome.gap_s, most_gap_s, f"a gap of {outcome.gap_s or 0:.1f} s"),
    )
    return ", ".join(words for value, most, words in goals if value is not None and value > most)
