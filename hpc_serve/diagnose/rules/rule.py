"""What a rule is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
# cause: it needs no other. error: it may also be survived, so it counts as much as an exception that no rule knows.
# death: a process was killed, which others see as symptoms. symptom: something else may have brought it about.
# consequence: something else has.
Kind = Literal["cause", "error", "death", "symptom", "consequence"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cause that is known by one line of a log.

    `pattern` is searched in the line without its head. `cause` is a sentence without its full stop, and `cure` one or
    more with. Both may name groups of the pattern in braces; what stands in [[ ]] is left out where a group in it is
    empty. With `in_notes`, lines whose level is no error count too, as long as few lines follow; with `is_final` as
    well, however many do.
    `pains` are numbers in the list of what goes wrong most, which the tests keep.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    cure: str
    kind: Kind = "cause"
    in_notes: bool = False
    is_final: bool = False
    pains: tuple[int, ...] = ()

    def cause_of(self, found: re.Match[str]) -> str:
        """The sentence about one line."""
        return _filled(self.cause, found)

    def cure_of(self, found: re.Match[str]) -> str:
        """What to do about it."""
        return _filled(self.cure, found)


def rule(
    name: str,
    pattern: str,
    cause: str,
    cure: str,
    *,
    kind: Kind = "cause",
    in_notes: bool = False,
    is_final: bool = False,
    pains: tuple[int, ...] = (),
) -> Rule:
    """A rule whose pattern is text."""
    return Rule(
        name=name,
        pattern=re.compile(pattern),
        cause=cause,
        cure=cure,
        kind=kind,
        in_notes=in_notes,
        is_final=is_final,
        pains=pains,
    )


def _filled(template: str, found: re.Match[str]) -> str:
    groups = {name: (value or "").strip().rstrip(".,").removesuffix(".0") for name, value in found.groupdict().items()}

    def part(optional: re.Match[str]) -> str:
        names = re.findall(r"{(\w+)}", optional[1])
        return optional[1] if all(groups[name] for name in names) else ""

    return _OPTIONAL.sub(part, template).format(**groups)
