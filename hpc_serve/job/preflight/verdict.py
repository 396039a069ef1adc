"""The result of a check on one node: its level, the finding with the number that decided it, and what to do. Pure.

The findings that need somebody to act are data: their levels, sentences and cures are in `checks/findings.ini`.
"""

from __future__ import annotations

import configparser
import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hpc_serve.rendezvous.preflight import LEVELS, Level
from hpc_serve.sizes import GIB, MIB

_UNITS = {"gib": (GIB, 1), "gib0": (GIB, 0), "mib": (MIB, 1), "mib0": (MIB, 0)}  # the unit, and digits after the point


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The finding of a check. `text` is a sentence without its full stop, `cure` one or more with."""

    level: Level
    text: str
    cure: str = ""


class _Sentence(string.Formatter):
    """Formats as `str.format`, and prints bytes in a unit."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec not in _UNITS:
            return cast(str, super().format_field(value, format_spec))
        unit, digits = _UNITS[format_spec]
        return f"{value / unit:.{digits}f}"


@lru_cache(maxsize=1)
def findings() -> configparser.RawConfigParser:
    """Return the findings, by name; each has `level`, `seen` and `cure`."""
    file = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",), empty_lines_in_values=False)
    file.read_string((Path(__file__).parent / "checks" / "findings.ini").read_text(encoding="utf-8"))
    return file


def found(finding: str, /, *, level: Level | None = None, **values: Any) -> Seen:
    """Return this finding with these values in its sentences, at its own level or at `level`."""
    data = findings()[finding]
    text, cure = (_Sentence().vformat(" ".join(data[key].split()), (), values) for key in ("seen", "cure"))
    return Seen(level=level or cast(Level, data["level"]), text=text, cure=cure)


def ok(text: str) -> Seen:
    return Seen(level="ok", text=text)


def not_checked(text: str) -> Seen:
    return Seen(level="not checked", text=text)


def worst(seen: Iterable[Seen]) -> Seen:
    """Return the first entry with the worst level."""
    return max(seen, key=lambda one: LEVELS.index(one.level))
