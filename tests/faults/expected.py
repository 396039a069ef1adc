"""What each fault may cost today, as data, beside what issue 10 asks for: nothing lost and nothing reported.

All requests of the load can be repeated or resumed, so the goal is the same for every fault: none is lost, and none is
reported as an error. A fault that is not named here must already meet it. `lost` and `reported` are the most that is
accepted today; None is any number. Tighten an entry when the product becomes better, and remove it when it is met.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Known:
    """A loss that is known: how many requests it may cost, and why."""

    lost: int | None = 0
    reported: int | None = 0
    why: str


_BROKEN_STREAM = "a stream that has begun is not resumed, and the SDK repeats no stream"
_NO_CANARY = "a request at an engine that answers no more waits for the SDK's timeout of 600 s, and others follow it"
_UNKNOWN_IS_OVER = "records that cannot be read are taken for no replicas"

KNOWN: dict[str, Known] = {
    "engine-killed": Known(reported=16, why=_BROKEN_STREAM),
    "launcher-killed": Known(reported=16, why=_BROKEN_STREAM),
    "raylet-killed": Known(reported=16, why=_BROKEN_STREAM),
    "gcs-killed": Known(reported=16, why=_BROKEN_STREAM),
    "scancel": Known(reported=16, why=f"nothing drains before the end: {_BROKEN_STREAM}"),
    "requeue": Known(reported=16, why=f"nothing drains before the end: {_BROKEN_STREAM}"),
    "time-limit": Known(reported=16, why=f"nothing drains before the end: {_BROKEN_STREAM}"),
    "preempted": Known(reported=16, why=f"nothing drains before the end: {_BROKEN_STREAM}"),
    "node-off": Known(lost=None, why=_NO_CANARY),
    "node-stopped": Known(lost=None, why=_NO_CANARY),
    "link-down": Known(lost=None, why=_NO_CANARY),
    "home-unreadable": Known(lost=None, reported=None, why=_UNKNOWN_IS_OVER),
    "stop": Known(reported=16, why=f"nothing drains before the end: {_BROKEN_STREAM}"),
    "engine-stopped": Known(lost=None, why=_NO_CANARY),
    "engine-hung": Known(lost=None, why=_NO_CANARY),
    "home-away": Known(lost=None, reported=None, why=_UNKNOWN_IS_OVER),
    "records-torn": Known(lost=None, reported=None, why=f"{_UNKNOWN_IS_OVER}: requests wait for the next renewal"),
    "records-foreign": Known(lost=None, reported=None, why=f"{_UNKNOWN_IS_OVER}: requests wait for the next renewal"),
}

NOTHING = Known(why="")


def surpasses(outcome: Outcome) -> str:
    """What of an outcome is more than what is known, in words; "" if nothing is."""
    known = KNOWN.get(outcome.fault, NOTHING)
    over = []
    if known.lost is not None and outcome.lost > known.lost:
        over.append(f"{outcome.lost} lost, at most {known.lost} expected")
    if known.reported is not None and outcome.reported > known.reported:
        over.append(f"{outcome.reported} reported, at most {known.reported} expected")
    return "; ".join(over)
