"""The pictures of a plan: that they are drawn, and what happens where they cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_serve.cli.main import run


def plan(*words: str) -> int:
    return run(["plan", "--model", "8b", *words])


@pytest.mark.parametrize(
    ("name", "start"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml"), ("plan.html", b"<!doctype html>")]
)
def test_every_format(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    assert plan("--plot", str(tmp_path / name)) == 0
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(start)
    if name.endswith(".svg"):
        for words in (b"Latency against throughput", b"Memory of the tightest GPU", b"KV cache", b"ideal roofline"):
            assert words in drawn


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert plan("--plot", str(tmp_path / "none" / "plan.png")) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan("--plot", str(tmp_path / "plan.png")) == 2
    assert "pip install 'hpc-serve[plot]'" in capsys.readouterr().err
