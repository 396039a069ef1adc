"""What the row of `batch` counts of an output: each id right and once, or lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import batch_row


def _line(number: int, text: str | None = None) -> str:
    custom_id = f"q{number}"
    content = batch_row._right(custom_id) if text is None else text
    body = {"choices": [{"message": {"content": content}}]}
    return json.dumps({"custom_id": custom_id, "response": {"body": body}, "error": None}) + "\n"


@pytest.mark.parametrize(
    ("changed", "answered", "lost"),
    [
        ({}, 10, 0),
        ({3: ""}, 9, 1),
        ({3: _line(4)}, 8, 2),  # one is missing, one is there twice
        ({3: _line(3, "w0.0000")}, 10, 1),
    ],
    ids=["all", "missing", "double", "wrong"],
)
def test_an_id_that_is_not_there_right_and_once_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[int, str], answered: int, lost: int
) -> None:
    monkeypatch.setattr(batch_row, "LINES", 10)
    service: Any = SimpleNamespace(out=tmp_path / "lines.jsonl", name="batch")
    run = batch_row._BatchRun(service)
    monkeypatch.setattr(run, "replicas", list)
    run.memory = {1: [(0, 80.0), (400, 90.0), (900, 91.0)], 2: [(900, 80.0)]}
    run.output.write_text("".join(changed.get(number, _line(number)) for number in range(10)))
    outcome = run.outcome()
    assert (outcome.sent, outcome.answered, outcome.lost) == (10, answered, lost)
    assert "90 MiB at line 400, 91 MiB at line 900" in outcome.note
