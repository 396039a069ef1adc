"""The page of a plan's speed: that its figures are the plan's, and that it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.plan import resolve
from tests.unit.conftest import Ran
from tests.unit.plan.conftest import Plan, Told


@pytest.fixture
def page(ran: Ran, tmp_path: Path) -> Told:
    """The page of a plan."""
    path = tmp_path / "plan.html"
    return lambda *words, model="8b": ran(["plan", model, *words, "--plot", str(path)]) and path.read_text("utf-8")


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("words", [(), ("--arrivals", "burst"), ("--decode-only", "--ideal")])
def test_the_figures_are_those_that_plan_prints(words: tuple[str, ...], page: Told, plan_json: Plan) -> None:
    data, printed = data_of(page(*words)), plan_json("8b", *words)["performance"]
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


def test_it_says_what_was_asked_and_all_formulas_are_there(page: Told) -> None:
    data = data_of(page("--decode-only", "--ideal", "--concurrency", "4", "--usd-per-gpu-hour", "2"))
    assert (data["formula"], data["ideal"], data["batch"], data["usd"]) == ("decode", True, 4, 2.0)
    assert [one["key"] for one in data["formulas"]] == ["steady", "burst", "decode"]
    assert "decoding alone: prompts are read elsewhere" in data["formulas"][2]["says"]
    assert "published sources of bursts" in data["formulas"][1]["accuracy"]
    assert 290 < data["subjects"][0]["critical"] < 300


def test_longer_prompts_leave_room_for_fewer_requests(page: Told) -> None:
    data = data_of(page("--max-model-len", "32768", "--output-tokens", "512"))
    assert data["contexts"] == [512, 1024, 2048, 4096, 8192, 16384]
    held = [curve["batch"][-1] for curve in data["subjects"][0]["curves"]["steady"]]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


def test_layouts_of_a_plan_and_accelerators_side_by_side(page: Told) -> None:
    layouts = data_of(page(model="70b"))["subjects"]
    assert layouts[0]["name"] == "TP=4 PP=1 (1 node x 4)"
    assert len({one["name"] for one in layouts}) == len(layouts) >= 3
    both = data_of(page("--compare", "h100-80gb,v6e"))
    assert [one["name"].split(",")[0] for one in both["subjects"]] == ["h100-80gb", "v6e"]
    assert both["unit"] == "device"
    assert "on TPUs" in both["formulas"][0]["accuracy"]


def test_it_needs_nothing_else(page: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page()
    outside = text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert not re.findall(r"https?:|\bsrc=|\bhref=|\bon\w+=|url\(|@import|\bimport\b|fetch\(|innerHTML", outside)
    assert "<noscript>" in text


def test_names_of_others_are_text(page: Told, tmp_path: Path) -> None:
    folder = tmp_path / "</script><img src=x onerror=alert(1)>"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(resolve("8b").config)), encoding="utf-8")
    text = page(model=str(folder))
    assert "<img" not in text
    assert text.count("</script>") == 2


@pytest.mark.parametrize(
    ("words", "file", "says"),
    [
        ("--compare l4,h100-80gb", "both.png", "--plot FILE.html"),
        ("--gpu cpu --gpu-memory 256GiB --max-model-len 8192", "cpu.html", "no source confirms"),
        ("", "none/plan.html", "cannot write"),
    ],
)
def test_what_cannot_be_drawn(refused: Told, tmp_path: Path, words: str, file: str, says: str) -> None:
    assert says in refused("8b", *words.split(), "--plot", str(tmp_path / file))
