"""What a person reads of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.bench.notes import notes_on
from hpc_serve.bench.report import run_lines, sweep_rows, table
from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import Pace
from tests.unit.bench.conftest import make_outcome, make_run

ANSWERED = make_outcome()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run(ANSWERED), None),
        (
            make_run(ANSWERED, others_tokens=600.0),
            "The engines generated 600 tokens for other requests meanwhile, and 3",
        ),
        (make_run(ANSWERED, waited=0.53), "waited for a core 53% of the time"),
        (make_run(ANSWERED, waited=0.08), None),
        (replace(make_run(ANSWERED), requests=make_run(ANSWERED).requests * 9), "1 of 9 requests had ended"),
        (make_run(ANSWERED, busy=0.93, late_s=0.0), "busy 93% of the time: the figures are its"),
        (make_run(ANSWERED, busy=0.2, late_s=0.05), "woke 50 ms late or later"),
        (make_run(replace(ANSWERED, input_len=12)), "1 of 1 prompts are not as long as asked for: from +2 to +2"),
        (make_run(replace(ANSWERED, output_len=1)), "1 of 1 answers are not as long as asked for: from -2 to -2"),
        (make_run(ANSWERED, replace(ANSWERED, place=1, error="HTTP 500: no")), "1 failed: HTTP 500: no"),
        (make_run(replace(ANSWERED, sent=2)), "1 request was sent to another replica"),
    ],
)
def test_what_is_not_as_asked_is_said(run, words):
    found = notes_on(run, {})
    assert [words in note for note in found] == ([True] if words else [])


def test_the_most_frequent_failures_are_named():
    errors = ["a", "b", "b", "c", "d", "e"]
    run = make_run(*(replace(ANSWERED, place=place, error=error) for place, error in enumerate(errors)))
    assert notes_on(run, {})[0] == "2 failed: b"
    assert "2 more reasons" in notes_on(run, {})[-1]


def test_one_run_is_told_in_the_words_of_vllm():
    run = make_run(ANSWERED, replace(ANSWERED, place=1, error="HTTP 500: no", replica=""))
    lines = list(run_lines(result_of(run)))
    for words in (
        "Successful requests:                     1",
        "Failed requests:                         1",
        "Output token throughput (tok/s):         1.50",
        "Median TTFT (ms):                        100.00",
        "P99 TPOT (ms):                           30.00",
    ):
        assert words in map(str.rstrip, lines)
    assert any(line.startswith("(none answered)") for line in lines)


def test_several_runs_are_rows():
    run = make_run(ANSWERED)
    slow = make_run(ANSWERED, pace=Pace(request_rate=4.0, max_concurrency=None))
    rows = sweep_rows([result_of(one) for one in (run, slow)])
    assert [row[3] for row in rows] == ["pace", "2 at once", "4/s"]
    assert len({len(row) for row in rows}) == 1
    assert len(list(table(rows))) == 3
