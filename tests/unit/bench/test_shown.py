"""Pages, pictures, checks of answers."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest

from hpc_serve.bench.page import page
from hpc_serve.bench.plot import draw_runs
from hpc_serve.bench.report import run_lines, sweep_rows
from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import Pace
from hpc_serve.bench.sweep import load_check, wrong_answers
from hpc_serve.errors import InvalidRequestError
from tests.unit.bench.conftest import make_outcome, make_run

RUN = make_run(make_outcome(), make_outcome(place=1, ttft_s=0.2, latency_s=0.4))
EXPECTED = {"output_throughput": 4.0, "mean_ttft_ms": 90.0, "mean_tpot_ms": 25.0}
SWEEP = [
    result_of(replace(RUN, pace=Pace(max_concurrency=1)), predicted=EXPECTED),
    result_of(replace(RUN, pace=Pace(max_concurrency=8)), predicted=EXPECTED),
    result_of(replace(RUN, service="<i>", pace=Pace(max_concurrency=8)), predicted={"reason": "a & b"}),
]


@pytest.mark.parametrize("runs", [SWEEP[:1], SWEEP])
def test_a_page_needs_nothing_else_and_shows_text_as_text(runs):
    html = page(runs)
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in unescape(html)
    assert "<i>" not in html
    assert html.count("<h2>Run ") == len(runs)
    for part in html.split("<svg")[1:]:
        ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    assert html.count("<svg") == (3 if len(runs) > 1 else 0)


def test_a_page_of_a_run_without_an_answer():
    failed = result_of(make_run(make_outcome(error="HTTP 500: no", replica="")))
    assert "1 failed: HTTP 500: no" in page([failed, failed])


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw_runs(SWEEP, tmp_path / "runs.svg")
    assert (tmp_path / "runs.svg").stat().st_size > 1000


def test_what_was_predicted_stands_beside_what_was_measured():
    lines = list(run_lines(SWEEP[0]))
    assert any(line.split() == ["Output", "tokens/s", "4.00", "3.00"] for line in lines)
    assert any(line.split() == ["Mean", "TPOT", "(ms)", "25.0", "65.0"] for line in lines)
    assert SWEEP[0]["predicted"] == EXPECTED
    assert "predicted" in sweep_rows(SWEEP)[0]
    assert "No prediction: a & b" in run_lines(SWEEP[2])


CHECK = """
def is_wrong(body, text):
    if text == "c":
        raise KeyError("c")
    return "no b" if "b" not in text else None
"""


def test_answers_are_checked_by_a_function_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(CHECK)
    check = load_check(f"{tmp_path}/mine.py:is_wrong")
    run = make_run(*(make_outcome(place=place, text=text) for place, text in enumerate("abc")))
    wrong = wrong_answers(run, check)
    assert wrong == {0: "no b", 2: "the check failed with KeyError: 'c'"}
    result = result_of(run, wrong=wrong)
    assert result["notes"] == ["2 answers are wrong by --check, the first: no b"]
    assert result["wrong_answers"] == 2
    assert result_of(run)["wrong_answers"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [("mine", "names no function"), ("no.py:f", "names no function"), ("{}:none", "has no function none")],
)
def test_a_check_that_is_none(tmp_path, words, told):
    (tmp_path / "mine.py").write_text(CHECK)
    with pytest.raises(InvalidRequestError, match=told):
        load_check(words.format(tmp_path / "mine.py"))
