"""What reads vLLM's results reads ours: the files of the installed vLLM that draw its sweeps, in a process of their
own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.bench.results import SUMMARY, document, result_of
from hpc_serve.bench.run import Pace
from tests.support.patience import PATIENCE_S
from tests.unit.bench.conftest import make_outcome, make_run

ANSWERED = make_outcome()
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
    runs = [make_run(ANSWERED, pace=Pace(max_concurrency=most)) for most in at_once]
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


def test_a_summary_is_a_list_of_one_run_too_and_any_other_file_that_run(tmp_path):
    result = result_of(make_run(ANSWERED))
    assert document([result], tmp_path / "summary.json") == [result]
    assert document([result], tmp_path / "one.json") == document([result]) == result
