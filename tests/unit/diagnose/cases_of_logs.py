"""Reads the cases: short excerpts of real logs, each with the rule that must name its cause, and where it was seen.

A case begins with "=== RULE | SOURCE". A thread is named as owner/repo#number; what was started here says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_serve.diagnose.causes import Finding, find_causes, note_lines
from hpc_serve.diagnose.evidence import LogEvidence

FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True, kw_only=True)
class Case:
    rule: str
    source: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rule} {self.source}"


def read_cases() -> list[Case]:
    """All cases."""
    cases = []
    for path in sorted(FOLDER.glob("*.log")):
        for part in path.read_text().split("=== ")[1:]:
            heading, *lines = part.rstrip("\n").splitlines()
            name, _, source = heading.partition(" | ")
            cases.append(Case(rule=name, source=source, lines=tuple(lines)))
    return cases


def cause_in(text: str) -> Finding | None:
    """The known cause that a sentence tells of, as a record says how a job ended."""
    found = find_causes([note_lines(LogEvidence("record"), text.splitlines())])
    return next((finding for finding in found if finding.is_known), None)
