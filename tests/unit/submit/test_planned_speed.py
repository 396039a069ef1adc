"""The speed that a plan expects, as a job carries it."""

from __future__ import annotations

import pytest

from hpc_serve.submit.plans.planned_speed import planned_request, planned_tokens_per_s, speed_figures
from hpc_serve.submit.plans.planning import plan_request
from hpc_serve.submit.request.request import ServeRequest

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
