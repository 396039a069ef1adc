"""The file of the runs that were measured here, and the speed that a plan expects, as a job carries it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.plan.speed.measured import Case, MeasuredRun
from hpc_serve.submit.plans.planned_speed import planned_request, planned_tokens_per_s, speed_figures
from hpc_serve.submit.plans.planning import FILE, MOST_RUNS, keep_run, measured_runs, plan_request
from hpc_serve.submit.request.request import ServeRequest

RUN = MeasuredRun(
    case=Case(accelerator="h200", numbers={"running": 64.0}, words={"model": "m"}),
    tokens_per_s=900.0,
    printed_tokens_per_s=1000.0,
    service="405b",
    at=1.0,
)


def test_what_is_kept_is_read_again_and_is_ones_own(tmp_path):
    home = tmp_path / "home"
    keep_run(home, RUN)
    keep_run(home, RUN)
    assert measured_runs(home) == (RUN, RUN)
    assert (home / FILE).stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_serve.submit.plans.planning.MOST_RUNS", 3)
    for number in range(5):
        keep_run(tmp_path, replace(RUN, at=float(number)))
    assert [run.at for run in measured_runs(tmp_path)] == [2.0, 3.0, 4.0]
    assert MOST_RUNS > 3


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"runs": 1}', '{"runs": [{"case": {}}]}'])
def test_a_damaged_file_counts_as_none(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    (tmp_path / FILE).chmod(0o600)
    assert measured_runs(tmp_path) == ()
    keep_run(tmp_path, RUN)
    assert measured_runs(tmp_path) == (RUN,)


def test_a_run_that_makes_no_sense_is_passed_over(tmp_path):
    many = replace(RUN.case, numbers={"running": -64.0})
    for changed in ({"tokens_per_s": 0.0}, {"case": many}, {"tokens_per_s": 1e300, "printed_tokens_per_s": 1e-300}):
        keep_run(tmp_path, replace(RUN, **changed))
    assert measured_runs(tmp_path) == ()


def test_a_link_to_others_runs_is_not_followed(tmp_path):
    keep_run(tmp_path / "theirs", RUN)
    (tmp_path / FILE).symlink_to(tmp_path / "theirs" / FILE)
    assert measured_runs(tmp_path) == ()


PREDICTED = {f"output_tokens_per_s_at_{count}": 100.0 * count for count in (1, 4, 16)}


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 100), (2, 200), (4, 400), (8, 800), (16, 1600), (500, 1600)])
def test_between_two_figures_it_goes_evenly(in_flight, expected):
    assert planned_tokens_per_s(PREDICTED, in_flight) == pytest.approx(expected)


@pytest.mark.parametrize(
    "predicted",
    [{}, {"weights_bytes": 7.0}, {"output_tokens_per_s_at_x": 1.0}, {"output_tokens_per_s_at_" + "9" * 5000: 1.0}],
)
def test_without_a_speed_there_is_none(predicted):
    assert planned_tokens_per_s(predicted, 4) is None
    assert planned_request(predicted) is None
    assert planned_tokens_per_s(PREDICTED, 0) is None


def test_the_figures_are_those_of_the_plan():
    result = plan_request(ServeRequest(model="8b", service="8b")).result
    figures = speed_figures(result.estimates())
    assert planned_request(figures) == (1024, 256)
    for estimate in result.estimates():
        expected = estimate.expected.output_tokens_per_s
        assert planned_tokens_per_s(figures, estimate.traffic.concurrency) == expected
    assert speed_figures([]) == {}
