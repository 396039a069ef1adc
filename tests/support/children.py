"""The processes that a process has started."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
