"""The report of a replica's preflight: a file beside its record, which its head writes before it starts the engine.

`hpc_serve.job.preflight` decides which checks there are, and what they look at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from hpc_serve.errors import RecordError, StoreError
from hpc_serve.rendezvous.fields import MAY_BE_MISSING, Timestamp
from hpc_serve.rendezvous.files import read_json
from hpc_serve.rendezvous.store import ServiceStore

Level = Literal["ok", "not checked", "warning", "failed"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the best to the worst."""
_NODES_SHOWN = 8


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
        """Return one line: how many checks had which result."""
        counts = [(level, len(self.of_level(level))) for level in reversed(LEVELS)]
        words = ", ".join(f"{count} {level}" for level, count in counts if count)
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return f"preflight of {nodes} in {self.took_s:.1f} s: {words}"


def preflight_file(store: ServiceStore, service: str, record_name: str) -> Path:
    """Return the path of the report of a record's replica. Raises InvalidRequestError for a wrong service."""
    return store.beside_record(service, record_name, ".preflight")


def read_preflight(path: Path) -> PreflightReport | None:
    """Return the report, as far as it can be read, for those who show it."""
    try:
        return read_json(PreflightReport, path)
    except (FileNotFoundError, StoreError, RecordError):
        return None
