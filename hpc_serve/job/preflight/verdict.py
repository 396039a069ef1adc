"""What a check says: its level, what was seen with the number that decided it, and what to do. Pure.

`Seen` is one check on one node, `Verdict` the same check over all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from hpc_serve.rendezvous.fields import MAY_BE_MISSING, Timestamp, from_json_text, to_json_text

Level = Literal["ok", "not checked", "warning", "failed"]
_LEVELS: tuple[Level, ...] = get_args(Level)
_LONGEST = 400
_NODES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a check saw. `text` is a sentence without its full stop, `cure` one or more with."""

    level: Level
    text: str
    cure: str = ""

    @property
    def rank(self) -> int:
        return _LEVELS.index(self.level)


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
    """The first of the worst."""
    return max(seen, key=lambda one: one.rank)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One check over all nodes: the worst that was seen, and on which nodes. `took_s` is that of the slowest node."""

    check: str
    level: Level
    nodes: tuple[str, ...]
    seen: str
    cure: str = ""
    took_s: float = 0.0

    @property
    def where(self) -> str:
        more = len(self.nodes) - _NODES_SHOWN
        return ", ".join(self.nodes[:_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    @property
    def sentence(self) -> str:
        """For a log or a record. `diagnose` has a rule that reads it."""
        cure = f" To do: {self.cure}" if self.cure else ""
        return f"preflight check {self.check}: {self.level} on {self.where}: {self.seen}.{cure}"


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """All verdicts of a run, in the order of the checks. `began_at` is in seconds since the epoch."""

    verdicts: tuple[Verdict, ...]
    num_nodes: int
    took_s: float
    began_at: Timestamp = field(default=0.0, metadata=MAY_BE_MISSING)

    def of_level(self, level: Level) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.level == level)

    @property
    def summary(self) -> str:
        """One line: how many checks had which result."""
        counts = [(level, len(self.of_level(level))) for level in reversed(_LEVELS)]
        words = ", ".join(f"{count} {level}" for level, count in counts if count)
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return f"preflight of {nodes} in {self.took_s:.1f} s: {words}"

    def to_json(self) -> str:
        return to_json_text(self)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> PreflightReport:
        """Read a report. Raises RecordError."""
        return from_json_text(cls, text, source=source)


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def report_file_name(run_log: str) -> str:
    """The name of a replica's report in its folder of logs."""
    return f"{run_log}-preflight.json"
