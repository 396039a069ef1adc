"""The page of a plan's speed: that its figures are the plan's, and that it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.cli.main import run


def page(folder: Path, *words: str, model: str = "8b") -> str:
    path = folder / "plan.html"
    assert run(["plan", "--model", model, *words, "--plot", str(path)]) == 0
    return path.read_text(encoding="utf-8")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def performance(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", "--model", "8b", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["performance"]
    return found


@pytest.mark.parametrize("words", [(), ("--arrivals", "burst"), ("--decode-only", "--ideal")])
def test_the_figures_are_those_that_plan_prints(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, printed = data_of(page(tmp_path, *words)), performance(capsys, *words)
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


def test_it_says_what_was_asked_and_all_formulas_are_there(tmp_path: Path) -> None:
    data = data_of(page(tmp_path, "--decode-only", "--ideal", "--concurrency", "4", "--usd-per-gpu-hour", "2"))
    assert (data["formula"], data["ideal"], data["batch"], data["usd"]) == ("decode", True, 4, 2.0)
    assert [one["key"] for one in data["formulas"]] == ["steady", "burst", "decode"]
    assert "decoding alone: prompts are read elsewhere" in data["formulas"][2]["says"]
    assert "published sources of bursts" in data["formulas"][1]["accuracy"]
    assert 290 < data["subjects"][0]["critical"] < 300


def test_longer_prompts_leave_room_for_fewer_requests(tmp_path: Path) -> None:
    data = data_of(page(tmp_path, "--max-model-len", "32768", "--output-tokens", "512"))
    assert data["contexts"] == [512, 1024, 2048, 4096, 8192, 16384]
    held = [curve["batch"][-1] for curve in data["subjects"][0]["curves"]["steady"]]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]


def test_layouts_of_a_plan_and_accelerators_side_by_side(tmp_path: Path) -> None:
    layouts = data_of(page(tmp_path, model="70b"))["subjects"]
    assert layouts[0]["name"] == "TP=4 PP=1 (1 node x 4)"
    assert len({one["name"] for one in layouts}) == len(layouts) >= 3
    both = data_of(page(tmp_path, "--compare", "h100-80gb,v6e"))
    assert [one["name"].split(",")[0] for one in both["subjects"]] == ["h100-80gb", "v6e"]
    assert both["unit"] == "device"
    assert "on TPUs" in both["formulas"][0]["accuracy"]


def test_it_needs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = page(tmp_path)
    outside = text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert not re.findall(r"https?:|\bsrc=|\bhref=|\bon\w+=|url\(|@import|\bimport\b|fetch\(|innerHTML", outside)
    assert "<noscript>" in text


def test_names_of_others_are_text(tmp_path: Path) -> None:
    from hpc_serve.plan import resolve

    folder = tmp_path / "</script><img src=x onerror=alert(1)>"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(resolve("8b").config)), encoding="utf-8")
    text = page(tmp_path, model=str(folder))
    assert "<img" not in text
    assert text.count("</script>") == 2


def test_a_picture_of_several_accelerators_is_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.png"
    assert run(["plan", "--model", "8b", "--compare", "l4,h100-80gb", "--plot", str(path)]) == 2
    assert "--plot FILE.html" in capsys.readouterr().err


def test_an_accelerator_of_unknown_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.html"
    words = ("--gpu", "cpu", "--gpu-memory", "256GiB", "--max-model-len", "8192", "--plot", str(path))
    assert run(["plan", "--model", "8b", *words]) == 2
    assert "no source confirms" in capsys.readouterr().err


def test_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "8b", "--plot", str(tmp_path / "none" / "plan.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
