"""The result of a check on one node: its level, the finding with the number that decided it, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_serve.rendezvous.preflight import LEVELS, Level

_LONGEST = 400


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The finding of a check. `text` is a sentence without its full stop, `cure` one or more with."""

    level: Level
    text: str
    cure: str = ""


def ok(text: str) -> Seen:
    return Seen(level="ok", text=text)


def not_checked(text: str) -> Seen:
    return Seen(level="not checked", text=text)


def warning(text: str, cure: str) -> Seen:
    return Seen(level="warning", text=text, cure=cure)


def failed(text: str, cure: str) -> Seen:
    """Only where the engine could not start."""
    return Seen(level="failed", text=text, cure=cure)


def worst(seen: Iterable[Seen]) -> Seen:
    """Return the first entry with the worst level."""
    return max(seen, key=lambda one: LEVELS.index(one.level))


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
