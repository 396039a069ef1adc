"""Programs of `tests/support` print their help when they are asked for it, and do no work."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests import support

ASKED_BY_PROGRAMS = {"vllm_parser", "vllm_ranks"}
"""They read lines from stdin."""
PROGRAMS = {path.stem for path in Path(support.__path__[0]).glob("*.py") if "__main__" in path.read_text("utf-8")}


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", sorted(PROGRAMS - ASKED_BY_PROGRAMS))
def test_a_program_prints_its_help_and_does_no_work(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"tests.support.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 80
    assert list(tmp_path.iterdir()) == []
