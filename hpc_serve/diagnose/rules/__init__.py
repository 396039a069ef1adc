"""The known causes: a line of a log, its cause, and its cure. The rules themselves are the files beside this module,
one for each topic.

A section of a file is a rule, by its name. `line` has regular expressions, one on each line. One match in a line of
a log without its head is enough. `cause` is a sentence without its full stop, and `cure` one or more
with. Both may name groups of the expression in braces; a part in [[ ]] is left out where a group in it is empty. The
rules are tried on a line in the order of `_TOPICS` and of their files: the first that fits counts.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

_TOPICS = (
    "preflight",  # first: its sentences name what other rules know
    *("memory", "model", "gpus", "slurm", "ray", "network", "environment"),
)
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
Kind = Literal["cause", "error", "death", "symptom", "consequence"]
"""cause: it needs no other. error: it may be survived, so it counts as much as an exception that no rule knows.
death: a process was killed, which others see as symptoms. symptom: something else may have caused it.
consequence: something else has caused it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A cause that is known by one line of a log.

    If `in_notes` is true, lines below the error level count too, as long as few lines follow. If `is_final` is true as
    well, any number of lines may follow. `pains` are numbers in the list of frequent failures, which the tests keep.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    cure: str
    kind: Kind = "cause"
    in_notes: bool = False
    is_final: bool = False
    pains: tuple[int, ...] = ()


def read_rules(text: str) -> list[Rule]:
    """Return the rules of one file. Raises ValueError, TypeError, KeyError or configparser.Error for a wrong file."""
    file = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",), empty_lines_in_values=False)
    file.read_string(text)
    return [_rule(name, dict(file[name])) for name in file.sections()]


def _rule(name: str, fields: Mapping[str, str]) -> Rule:
    given = {key: " ".join(value.split()) for key, value in fields.items()}
    kind = given.pop("kind", "cause")
    if kind not in get_args(Kind):
        raise ValueError(f"[{name}]: {kind} is not a kind of rule")
    del given["line"]
    return Rule(
        name=name,
        pattern=re.compile("|".join(filter(None, fields["line"].splitlines()))),
        kind=cast(Kind, kind),
        in_notes=given.pop("in_notes", "no") == "yes",
        is_final=given.pop("is_final", "no") == "yes",
        pains=tuple(map(int, given.pop("pains", "").split())),
        **given,
    )


def filled(template: str, found: re.Match[str]) -> str:
    """Return the cause, or the cure, of a rule with the words of one line in it."""
    groups = {name: (value or "").strip().rstrip(".,").removesuffix(".0") for name, value in found.groupdict().items()}

    def part(optional: re.Match[str]) -> str:
        names = re.findall(r"{(\w+)}", optional[1])
        return optional[1] if all(groups[name] for name in names) else ""

    return _OPTIONAL.sub(part, template).format(**groups)


RULES: tuple[Rule, ...] = tuple(
    rule
    for topic in _TOPICS
    for rule in read_rules((Path(__file__).parent / f"{topic}.ini").read_text(encoding="utf-8"))
)
"""All rules."""
