"""The pictures of a plan: that they are drawn, and what happens where they cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_serve.cli.main import run


def plan(*words: str, model: str = "8b") -> int:
    return run(["plan", "--model", model, *words])


def drawing(folder: Path, *words: str, model: str = "8b") -> str:
    """The text of a plan's picture: SVG keeps words as they are."""
    pytest.importorskip("matplotlib")
    assert plan(*words, "--plot", str(folder / "plan.svg"), model=model) == 0
    return (folder / "plan.svg").read_text(encoding="utf-8")


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


def test_the_chosen_layout_is_among_those_drawn(tmp_path: Path) -> None:
    drawn = drawing(tmp_path, model="qwen3-235b")  # six smaller layouts come before it
    assert "1 x 8, chosen" in drawn
    assert drawn.count(", too small") + drawn.count(", fits") == 4


def test_the_last_batch_is_explained_by_what_limits_it(tmp_path: Path) -> None:
    assert "as many as the cache holds" in drawing(tmp_path)
    limited = drawing(tmp_path, "--max-num-seqs", "16")
    assert "--max-num-seqs 16, not the cache" in limited
    assert "as many as the cache holds" not in limited


def test_the_length_asked_for_has_a_curve(tmp_path: Path) -> None:
    drawn = drawing(tmp_path, "--input-tokens", "100000")
    assert "100,000 tokens in" in drawn
    assert drawn.count(" tokens in, up to ") == 4
