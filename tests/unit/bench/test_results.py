"""The figures by hand, as `vllm bench serve` defines them, its keys, and what a person reads of a run."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from hpc_serve.bench.page import page
from hpc_serve.bench.plot import draw_runs
from hpc_serve.bench.report import run_lines, sweep_rows, table
from hpc_serve.bench.results import SUMMARY, document, figures_of, notes_on, result_of, spread
from hpc_serve.bench.run import Pace
from tests.support.patience import PATIENCE_S
from tests.unit.bench.conftest import make_outcome, make_run

QUICK = make_outcome()
SLOW = make_outcome(
    place=1, output_len=5, ttft_s=0.25, itls_s=(0.1, 0.2, 0.1, 0.8), latency_s=1.45, start_s=100.5, replica="2-r0-0"
)
FAILED = make_outcome(place=2, error="HTTP 500: no", replica="")
LATER = make_outcome(place=1, start_s=105.0)
OF_ONE_TOKEN = make_outcome(output_len=1, itls_s=(), latency_s=0.1)


@pytest.mark.parametrize(
    ("outcomes", "duration_s", "expected"),
    [
        (
            [QUICK, SLOW, FAILED],
            2.0,
            {
                **{"completed": 2, "failed": 1, "total_input_tokens": 20, "total_output_tokens": 8},
                **{"request_throughput": 1.0, "output_throughput": 4.0, "total_token_throughput": 14.0},
                **{"mean_ttft_ms": 175, "median_tpot_ms": 165, "std_tpot_ms": 135, "mean_itl_ms": 1e3 * 1.26 / 6},
                **{"median_itl_ms": 100, "p99_e2el_ms": 160 + 0.99 * 1290},
            },
        ),
        # Pieces of the first second: three of QUICK, and of SLOW those at 0.75 and 0.85.
        ([QUICK, SLOW], 2.0, {"max_output_tokens_per_s": 5, "max_concurrent_requests": 2}),
        ([QUICK, LATER], 6.0, {"max_output_tokens_per_s": 3, "max_concurrent_requests": 1}),
        ([OF_ONE_TOKEN, QUICK], 1.0, {"mean_tpot_ms": 30, "mean_ttft_ms": 100}),
        ([FAILED], 2.0, {"completed": 0, "output_throughput": 0, "max_output_tokens_per_s": 0, "mean_ttft_ms": 0}),
    ],
    ids=["all", "peaks", "later", "one token", "nothing"],
)
def test_figures_are_those_of_vllm_and_count_answered_requests_alone(outcomes, duration_s, expected):
    figures = figures_of(outcomes, duration_s)
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["request_goodput"] is None


def test_goals_are_met_together():
    figures = figures_of([QUICK, SLOW], 2.0, goals_ms={"ttft": 400, "tpot": 100})
    assert figures["request_goodput"] == 0.5


def test_percentiles_lie_between_values():
    assert spread("ttft", [1.0])["p99_ttft_ms"] == 1000
    assert spread("ttft", [0.1, 0.2])["p90_ttft_ms"] == pytest.approx(190)
    assert spread("ttft", [0.001 * number for number in range(101)])["p99_ttft_ms"] == pytest.approx(99)


def test_replicas_without_an_answer_are_there():
    run = make_run(QUICK, SLOW, FAILED, replicas=("1-r0-0", "2-r0-0", "3-r0-0"))
    counts = {name: (part["completed"], part["failed"]) for name, part in result_of(run)["replicas"].items()}
    assert counts == {"1-r0-0": (1, 0), "2-r0-0": (1, 0), "3-r0-0": (0, 0), "": (0, 1)}


def test_the_json_has_all_keys_of_vllm_and_their_values():
    keys = result_of(make_run(QUICK, SLOW, FAILED), is_detailed=True)
    assert keys["output_throughput"] == 4.0
    assert keys["p99_ttft_ms"] == pytest.approx(248.5)
    assert keys["ttfts"] == [0.1, 0.25, 0.1]
    assert keys["errors"] == ["", "", "HTTP 500: no"]
    assert keys["request_rate"] == "inf"
    assert keys["replicas"]["2-r0-0"]["completed"] == 1
    assert json.loads(json.dumps(document([keys]))) == keys
    assert document([keys], Path("one.json")) == keys
    assert document([keys, keys]) == [keys, keys]
    assert document([keys], Path("summary.json")) == [keys]
    assert vllm_keys() <= set(keys)


def vllm_keys() -> set[str]:
    """The keys of a result of generation in the installed vLLM, from its source: its import takes ten seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(found.origin).parent / "benchmarks" / "serve.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
            if {"total_output_tokens", "ttfts"} <= keys:
                times = {f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl") for what in ("mean", "median", "p99")}
                return keys | times | {"date", "backend", "model_id", "num_prompts", "request_rate", "max_concurrency"}
    raise AssertionError("vLLM's benchmark has no such result any more")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run(QUICK), None),
        (
            make_run(QUICK, others_tokens=600.0),
            "The engines generated 600 tokens for other requests meanwhile, and 3",
        ),
        (make_run(QUICK, others_tokens=1.0), None),
        (make_run(QUICK, waited=0.53), "waited for a core 53% of the time"),
        (make_run(QUICK, waited=0.08), None),
        (replace(make_run(QUICK), requests=make_run(QUICK).requests * 9), "1 of 9 requests had ended"),
        (make_run(QUICK, busy=0.93, late_s=0.0), "busy 93% of the time: the figures are its"),
        (make_run(QUICK, busy=0.2, late_s=0.05), "woke 50 ms late or later"),
        (make_run(replace(QUICK, input_len=12)), "1 of 1 prompts are not as long as asked for: from +2 to +2"),
        (make_run(replace(QUICK, output_len=1)), "1 of 1 answers are not as long as asked for: from -2 to -2"),
        (make_run(QUICK, replace(QUICK, place=1, error="HTTP 500: no")), "1 failed: HTTP 500: no"),
        (make_run(replace(QUICK, sent=2)), "1 request was sent to another replica"),
    ],
)
def test_what_is_not_as_asked_is_said(run, words):
    found = notes_on(run, {})
    assert [words in note for note in found] == ([True] if words else [])


def test_the_most_frequent_failures_are_named():
    errors = ["a", "b", "b", "c", "d", "e"]
    run = make_run(*(replace(QUICK, place=place, error=error) for place, error in enumerate(errors)))
    assert notes_on(run, {})[0] == "2 failed: b"
    assert "2 more reasons" in notes_on(run, {})[-1]


def test_one_run_is_told_in_the_words_of_vllm():
    run = make_run(QUICK, replace(QUICK, place=1, error="HTTP 500: no", replica=""))
    lines = list(map(str.rstrip, run_lines(result_of(run))))
    assert {
        "Successful requests:                     1",
        "Failed requests:                         1",
        "Output token throughput (tok/s):         1.50",
        "Median TTFT (ms):                        100.00",
        "P99 TPOT (ms):                           30.00",
    } <= set(lines)
    assert any(line.startswith("(none answered)") for line in lines)


def test_several_runs_are_rows():
    run = make_run(QUICK)
    slow = make_run(QUICK, pace=Pace(request_rate=4.0, max_concurrency=None))
    rows = sweep_rows([result_of(one) for one in (run, slow)])
    assert [row[3] for row in rows] == ["pace", "2 at once", "4/s"]
    assert len({len(row) for row in rows}) == 1
    assert len(list(table(rows))) == 3


# -- pages and pictures

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
    failed = result_of(make_run(FAILED))
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


# -- vLLM's own readers, in a process of their own

ROOT = Path(__file__).parents[3]


def read(reader: str, folder: Path, *words: str) -> str:
    """What vLLM's reader prints of the results in a folder."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    argv = [sys.executable, "-m", "tests.support.vllm_sweep_reader", reader, str(folder), *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def save(folder: Path, *at_once: int, is_detailed: bool = False) -> Path:
    """A file as `bench --save FOLDER/summary.json` writes it, of a run for each number of requests at once."""
    runs = [make_run(QUICK, pace=Pace(max_concurrency=most)) for most in at_once]
    path = folder / SUMMARY
    path.write_text(json.dumps(document([result_of(one, is_detailed=is_detailed) for one in runs], path)))
    return path


@pytest.mark.parametrize("at_once", [(4,), (1, 8)])
@pytest.mark.parametrize("is_detailed", [False, True])
def test_vllms_plot_of_a_sweep_finds_runs_and_their_keys(tmp_path, at_once, is_detailed):
    save(tmp_path, *at_once, is_detailed=is_detailed)
    words = ("--fig-by", "service,workload", "--row-by", "max_concurrency", "--col-by", "request_rate")
    printed = read("plot", tmp_path, *words)
    assert "Group: {'service': '405b', 'workload': 'random 10/3'}" in printed
    assert f"Grid: {len(at_once)} rows x 1 cols" in printed


def test_vllms_plot_of_throughput_by_user_finds_both(tmp_path):
    save(tmp_path, 1, 8)
    printed = read("plot_pareto", tmp_path, "--user-count-var", "max_concurrency")
    assert "[BEGIN FIGURE]" in printed
    assert "Skipped" not in printed
    assert "1 users, 1.50 tokens/s each\n8 users, 0.19 tokens/s each" in printed
