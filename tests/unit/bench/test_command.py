"""`hpc-serve bench` as it is typed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S, wait_until

SMALL = ("--lengths", "40/6", "--num-prompts", "12")


def test_one_run_is_shown_and_saved(engine, tmp_path, ran):
    saved = tmp_path / "figures.json"
    printed = ran(["bench", "405b", *SMALL, "--max-concurrency", "4", "--save", str(saved), "--detailed"]).out
    assert "Successful requests:                     12" in printed
    assert "100-r0-0" in printed
    result = json.loads(saved.read_text())
    assert (result["completed"], result["max_concurrency"], len(result["ttfts"])) == (12, 4, 12)


def test_figures_that_cannot_be_saved_are_printed_all_the_same(engine, ran):
    told = ran(["bench", "405b", *SMALL, "--save", "/dev/full"], 1)
    assert "Successful requests:                     12" in told.out
    assert "/dev/full cannot be written: No space left on device." in told.err


def test_a_file_that_is_not_in_utf_8_is_told_what_to_do(engine, tmp_path, ran):
    file = tmp_path / "requests.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "a"}'))
    assert "in UTF-8, and do not compress it" in ran(["bench", "405b", "--dataset-path", str(file)], 2).err


def test_a_sweep_is_a_table_and_a_list(service, tmp_path, ran):
    service.start()
    saved = tmp_path / "summary.json"
    words = ["--lengths", "40/6,20/3", "--num-prompts", "6", "--max-concurrency", "1,3", "--goodput", "ttft:60000"]
    printed = ran(["bench", *words, "--save", str(saved)]).out.splitlines()  # of the one service that there is
    assert printed[0].split()[:4] == ["service", "replicas", "workload", "pace"]
    assert [line.split()[3] for line in printed[1:5]] == ["40/6", "40/6", "20/3", "20/3"]
    assert [one["request_goodput"] > 0 for one in json.loads(saved.read_text())] == [True] * 4


def test_a_sweep_whose_last_engine_dies_keeps_the_runs_before(service, tmp_path, ran):
    service.start("--stub-die-at-request", "5")
    saved = tmp_path / "summary.json"
    words = ["--lengths", "20/3", "--num-prompts", "6", "--max-concurrency", "1,3", "--save", str(saved)]
    told = ran(["bench", "405b", *words], 1)
    assert "error: 405b does not answer /tokenize: no ready replica of 405b is left" in told.err
    found = [(one["completed"], one["failed"]) for one in json.loads(saved.read_text())]
    assert found == [(3, 3)]
    assert "Successful requests:                     3" in told.out


def test_a_sweep_in_full_has_all_figures_of_each_run(service, ran):
    service.start()
    words = ["--lengths", "20/3", "--num-prompts", "6", "--max-concurrency", "1,3", "--full"]
    printed = ran(["bench", "405b", *words]).out
    for most in (1, 3):
        assert f"Run {1 if most == 1 else 2}: 405b, random 20/3, {most} at once\n===" in printed
        assert f"Maximum request concurrency:             {most}" in printed
    assert printed.count("Median ITL (ms):") == printed.count("100-r0-0") == 2
    assert printed.splitlines()[-3].split()[:4] == ["service", "replicas", "workload", "pace"]


def test_json_is_all_that_stdout_holds(engine, ran):
    result = json.loads(ran(["bench", "405b", *SMALL, "--request-rate", "500", "--json"]).out)
    assert (result["request_rate"], result["max_concurrency"]) == (500.0, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((["--lengths", text], f"{text}: write tokens in/tokens out") for text in ("5", "a/b", "0/5", "1/2,", "-1/5")),
        (["--max-concurrency", "0"], "'--max-concurrency': 0: write numbers above 0"),
        (["--request-rate", "x"], "'--request-rate': x: write"),
        (["--dataset-name", "custom"], "--dataset-name custom needs --dataset-path"),
        (["--dataset-name", "chat", "--dataset-path", "f"], "chat is made and has no --dataset-path"),
        (["--dataset-path", "f", "--lengths", "1/2"], "A file has its own prompts"),
        (["--output-len", "5"], "--output-len is for files"),
        (["--extra-body", "[1]"], "no JSON object"),
        (["--plot", "runs.doc"], "does not end in .png"),
        (["--save", "nowhere/runs.json"], "nowhere is no folder"),
        (["--html", "nowhere/runs.html"], "nowhere is no folder"),
        (["--goodput", "itl:5"], "'--goodput': itl:5: write ttft, tpot or e2el"),
        (["--burstiness", "nan"], "nan is not above 0"),
        (["--gpu", "h1000"], "'h1000' is not an accelerator in the catalogue. Did you mean h100"),
    ],
)
def test_words_that_cannot_be_are_told_before_anything_is_asked(words, told, ran, monkeypatch, tmp_path):
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path))
    assert told in ran(["bench", "405b", *words], 2).err


def test_a_service_that_is_not_there_is_told_before_another_is_measured(engine, ran):
    told = ran(["bench", "405b", "typo", *SMALL], 5)
    assert "No service 'typo'" in told.err
    assert "run 1" not in told.err
    assert "1 request\n" in ran(["bench", "405b", "--lengths", "20/3", "--num-prompts", "1"]).err


def test_ctrl_c_keeps_what_was_measured(service, work_log, tmp_path):
    service.start(*work_log.flags, "--stub-word-s", "0.02")
    saved = tmp_path / "figures.json"
    argv = [sys.executable, "-m", "hpc_serve.cli", "bench", "405b", "--lengths", "40/6", "--num-prompts", "2000"]
    environ = {**os.environ, "HPC_SERVE_HOME": str(service.store.home)}
    process = subprocess.Popen([*argv, "--max-concurrency", "1", "--save", str(saved)], env=environ)
    try:
        wait_until(lambda: work_log.count("begun") >= 6, within_s=5 * PATIENCE_S)  # one after the other
        process.send_signal(signal.SIGINT)
        assert process.wait(5 * PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    result = json.loads(saved.read_text())
    assert result["interrupted"]
    assert result["completed"] >= 3  # one was the first, which does not count, and one may be under way


def test_all_ways_of_showing_a_sweep(engine, tmp_path, ran):
    (tmp_path / "mine.py").write_text("def is_wrong(body, text):\n    return 'no word' if len(text) > 0 else None\n")
    words = ["--num-prompts", "4", "--lengths", "20/3", "--max-concurrency", "1,2", "--gpu", "h100-80gb"]
    check = ["--check", f"{tmp_path / 'mine.py'}:is_wrong"]
    printed = ran(["bench", "405b", *words, *check, "--html", str(tmp_path / "runs.html")]).out
    assert "4 answers are wrong by --check, the first: no word" in printed
    assert "No prediction: meta-llama/Llama-3.1-405B-Instruct does not fit" in printed  # the stub's record says one GPU
    assert (tmp_path / "runs.html").read_text().startswith("<!doctype html>")
