"""What a pain is, what was seen of it, and whether that is right.

How one is brought about is a function in `slurm_pains`, `engine_pains` or `further_pains`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.pains.site import Site

How = Literal["real", "stand-in"]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a user was told. `by` names the check, the rule or the program that told it.

    `is_before_weights`: no byte of the weights was read by then. None where nothing had to be told. Without
    `is_measured` it broke, and `said` is why.
    """

    said: str
    by: str
    is_before_weights: bool | None
    seconds: float
    is_measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Pain:
    """`number` is that of the table in docs/evidence/pains.md, 0 for those beside it. What is said must match `right`.

    `keeps_job`: the next one goes on with its job.
    """

    name: str
    number: int
    title: str
    how: How
    right: re.Pattern[str]
    needs_engine: bool
    keeps_job: bool
    provoke: Callable[[Site], Seen]

    def is_right(self, seen: Seen) -> bool:
        return seen.is_measured and self.right.search(seen.said) is not None


PAINS: dict[str, Pain] = {}
"""All that can be brought about here, by name, in the order in which they are run."""


def pain(
    number: int, title: str, right: str, *, how: How = "real", needs_engine: bool = False, keeps_job: bool = False
) -> Callable[[Callable[[Site], Seen]], Callable[[Site], Seen]]:
    """Enter a function that brings a pain about and returns what was said of it."""

    def enter(provoke: Callable[[Site], Seen]) -> Callable[[Site], Seen]:
        name = provoke.__name__
        PAINS[name] = Pain(
            name=name,
            number=number,
            title=title,
            how=how,
            right=re.compile(right),
            needs_engine=needs_engine,
            keeps_job=keeps_job,
            provoke=provoke,
        )
        return provoke

    return enter
