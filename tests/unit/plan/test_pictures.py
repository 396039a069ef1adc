"""The pictures of a plan and the page of its speed: what they show, and what happens where they cannot be drawn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.plan import resolve


@pytest.fixture
def drawn(ran, tmp_path: Path):
    """The text of a plan's picture or page: SVG keeps words as they are."""

    def draw(name: str, *words: str, model: str = "8b") -> str:
        if name.endswith(".svg"):
            pytest.importorskip("matplotlib")
        ran(["plan", model, *words, "--plot", str(tmp_path / name)])
        return (tmp_path / name).read_text("utf-8")

    return draw


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.pdf", b"%PDF"), ("plan.svg", b"<?xml")])
def test_every_format(ran, tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    ran(["plan", "8b", "--plot", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_has_its_parts(drawn) -> None:
    text = drawn("plan.svg")
    for words in ("Latency against throughput", "Memory of the tightest GPU", "KV cache", "ideal roofline"):
        assert words in text


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path, refused):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'hpc-serve[plot]'" in refused("8b", "--plot", str(tmp_path / "plan.png"))


def test_the_chosen_layout_is_among_those_drawn(drawn) -> None:
    text = drawn("plan.svg", model="qwen3-235b")  # six smaller layouts come before it
    assert "1 x 8, chosen" in text
    assert text.count(", too small") + text.count(", fits") == 4


def test_the_last_batch_is_explained_by_what_limits_it(drawn) -> None:
    assert "as many as the cache holds" in drawn("plan.svg")
    limited = drawn("plan.svg", "--max-num-seqs", "16")
    assert "--max-num-seqs 16, not the cache" in limited
    assert "as many as the cache holds" not in limited


def test_the_length_asked_for_has_a_curve(drawn) -> None:
    text = drawn("plan.svg", "--input-tokens", "100000")
    assert "100,000 tokens in" in text
    assert text.count(" tokens in, up to ") == 4


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("words", [(), ("--arrivals", "burst"), ("--decode-only", "--ideal")])
def test_the_figures_are_those_that_plan_prints(words: tuple[str, ...], drawn, plan_json) -> None:
    data, printed = data_of(drawn("plan.html", *words)), plan_json("8b", *words)["performance"]
    curve = data["subjects"][0]["curves"][data["formula"]][data["context"]]
    assert data["contexts"][data["context"]] == printed["input_tokens"] == 1024
    assert curve["batch"][-1] == printed["by_concurrency"][-1]["concurrency"]
    for line in printed["by_concurrency"]:
        step = curve["batch"].index(line["concurrency"])
        for kind in ("ideal", "expected"):
            assert curve[kind]["rate"][step] == pytest.approx(line[kind]["output_tokens_per_s"], rel=1e-3)
            assert curve[kind]["tpot"][step] == pytest.approx(1000 * line[kind]["tpot_s"], rel=1e-3)
            assert curve[kind]["ttft"][step] == pytest.approx(1000 * line[kind]["ttft_s"], rel=1e-3)
        assert curve["ideal" if data["ideal"] else "expected"]["bound"][step] == line["bound"]


def test_it_says_what_was_asked_and_all_formulas_are_there(drawn) -> None:
    data = data_of(drawn("plan.html", "--decode-only", "--ideal", "--concurrency", "4", "--usd-per-gpu-hour", "2"))
    assert (data["formula"], data["ideal"], data["batch"], data["usd"]) == ("decode", True, 4, 2.0)
    assert [one["key"] for one in data["formulas"]] == ["steady", "burst", "decode"]
    assert "decoding alone: prompts are read elsewhere" in data["formulas"][2]["says"]
    assert "published sources of bursts" in data["formulas"][1]["accuracy"]
    assert 290 < data["subjects"][0]["critical"] < 300


def test_longer_prompts_leave_room_for_fewer_requests(drawn) -> None:
    data = data_of(drawn("plan.html", "--max-model-len", "32768", "--output-tokens", "512"))
    assert data["contexts"] == [512, 1024, 2048, 4096, 8192, 16384]
    held = [curve["batch"][-1] for curve in data["subjects"][0]["curves"]["steady"]]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


def test_layouts_of_a_plan_and_accelerators_side_by_side(drawn) -> None:
    layouts = data_of(drawn("plan.html", model="70b"))["subjects"]
    assert layouts[0]["name"] == "TP=4 PP=1 (1 node x 4)"
    assert len({one["name"] for one in layouts}) == len(layouts) >= 3
    both = data_of(drawn("plan.html", "--compare", "h100-80gb,v6e"))
    assert [one["name"].split(",")[0] for one in both["subjects"]] == ["h100-80gb", "v6e"]
    assert both["unit"] == "device"
    assert "on TPUs" in both["formulas"][0]["accuracy"]


def test_it_needs_nothing_else(drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = drawn("plan.html")
    outside = text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert not re.findall(r"https?:|\bsrc=|\bhref=|\bon\w+=|url\(|@import|\bimport\b|fetch\(|innerHTML", outside)
    assert "<noscript>" in text


def test_names_of_others_are_text(drawn, tmp_path: Path) -> None:
    folder = tmp_path / "</script><img src=x onerror=alert(1)>"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(resolve("8b").config)), encoding="utf-8")
    text = drawn("plan.html", model=str(folder))
    assert "<img" not in text
    assert text.count("</script>") == 2


@pytest.mark.parametrize(
    ("words", "file", "says"),
    [
        ("--compare l4,h100-80gb", "both.png", "--plot FILE.html"),
        ("--gpu cpu --gpu-memory 256GiB --max-model-len 8192", "cpu.html", "no source confirms"),
        ("", "none/plan.html", "cannot write"),
        ("", "none/plan.png", "cannot write"),
    ],
)
def test_what_cannot_be_drawn(refused, tmp_path: Path, words: str, file: str, says: str) -> None:
    pytest.importorskip("matplotlib")
    assert says in refused("8b", *words.split(), "--plot", str(tmp_path / file))
