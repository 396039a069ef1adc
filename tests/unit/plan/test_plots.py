"""The pictures of a plan: that they are drawn, and what happens where they cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.conftest import Ran
from tests.unit.plan.conftest import Told


@pytest.fixture
def drawing(ran: Ran, tmp_path: Path) -> Told:
    """The text of a plan's picture: SVG keeps words as they are."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    return lambda *words, model="8b": ran(["plan", model, *words, "--plot", str(path)]) and path.read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "start"), [("plan.png", b"\x89PNG"), ("plan.pdf", b"%PDF"), ("plan.html", b"<!doctype html>")]
)
def test_every_format(ran: Ran, tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    ran(["plan", "8b", "--plot", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_has_its_parts(drawing: Told) -> None:
    drawn = drawing()
    assert drawn.startswith("<?xml")
    for words in ("Latency against throughput", "Memory of the tightest GPU", "KV cache", "ideal roofline"):
        assert words in drawn


def test_a_folder_that_is_not_there(refused: Told, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "cannot write" in refused("8b", "--plot", str(tmp_path / "none" / "plan.png"))


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Told
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'hpc-serve[plot]'" in refused("8b", "--plot", str(tmp_path / "plan.png"))


def test_the_chosen_layout_is_among_those_drawn(drawing: Told) -> None:
    drawn = drawing(model="qwen3-235b")  # six smaller layouts come before it
    assert "1 x 8, chosen" in drawn
    assert drawn.count(", too small") + drawn.count(", fits") == 4


def test_the_last_batch_is_explained_by_what_limits_it(drawing: Told) -> None:
    assert "as many as the cache holds" in drawing()
    limited = drawing("--max-num-seqs", "16")
    assert "--max-num-seqs 16, not the cache" in limited
    assert "as many as the cache holds" not in limited


def test_the_length_asked_for_has_a_curve(drawing: Told) -> None:
    drawn = drawing("--input-tokens", "100000")
    assert "100,000 tokens in" in drawn
    assert drawn.count(" tokens in, up to ") == 4
