"""Speeds that are corrected by runs measured here: near runs count, far ones and wrong ones do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.make import PlanRequest
from hpc_serve.plan.speed.estimate import SpeedEstimate, case_of
from hpc_serve.plan.speed.measured import REPEATED, Case, Correction, MeasuredHere, MeasuredRun
from hpc_serve.plan.speed.step import EXPECTED
from hpc_serve.rendezvous.store import default_home
from hpc_serve.submit.plans.planning import keep_run, plan_for

PUBLISHED = (0.63, 1.44)
CASE = Case(
    accelerator="h100-80gb",
    numbers={"tensor_parallel_size": 4, "input_tokens": 1000, "running": 64},
    words={"model": "m", "graphs": "FULL"},
)


def run_of(ratio: float, case: Case = CASE, **numbers: float) -> MeasuredRun:
    case = replace(case, numbers={**case.numbers, **numbers})
    return MeasuredRun(case=case, tokens_per_s=1000 * ratio, printed_tokens_per_s=1000)


def correction(*runs: MeasuredRun, published: tuple[float, float] | None = PUBLISHED) -> Correction | None:
    return MeasuredHere(runs, "h100-80gb").correction(CASE, published)


def found(*runs: MeasuredRun, published: tuple[float, float] | None = PUBLISHED) -> Correction:
    one = correction(*runs, published=published)
    assert one is not None
    return one


def test_runs_of_the_same_case_are_believed_and_narrow_the_range():
    one = found(run_of(0.8), run_of(0.82))
    assert one.runs == 2
    assert one.ratio == pytest.approx(0.81, rel=0.03)
    low, high = one.bounds
    assert PUBLISHED[0] < low < 0.95
    assert 1.05 < high < PUBLISHED[1]


def test_the_farther_a_run_is_the_less_it_says_and_the_wider_the_range():
    cases = [found(run_of(0.7, running=64 * 2**steps)) for steps in (0, 0.5, 1, 2)]
    ratios = [one.ratio for one in cases]
    assert ratios == sorted(ratios)
    widths = [one.bounds[1] / one.bounds[0] for one in cases]
    assert widths == sorted(widths)
    assert widths[-1] < PUBLISHED[1] / PUBLISHED[0]
    assert correction(run_of(0.7, running=1)) is None
    assert correction(run_of(0.7, replace(CASE, words={"model": "n", "graphs": "NONE", "arrivals": "burst"}))) is None


def test_the_nearer_of_two_runs_decides():
    near, far = run_of(0.8), run_of(0.95, running=128)
    assert found(near, far).ratio == pytest.approx(0.83, abs=0.03)


def test_runs_on_another_accelerator_say_nothing():
    assert correction(run_of(0.7, replace(CASE, accelerator="h200"))) is None


def test_a_run_alone_outside_of_the_published_range_does_not_count_until_another_agrees():
    wrong = run_of(0.2)
    assert correction(wrong) is None
    assert found(run_of(0.6)).ratio > 0.6  # just outside: it says less
    assert found(wrong, run_of(0.21)).ratio == pytest.approx(0.22, abs=0.02)


@pytest.mark.parametrize("published", [PUBLISHED, None])
def test_a_run_that_others_slowed_says_next_to_nothing_beside_one_that_nothing_slowed(published):
    right = found(run_of(0.9), run_of(0.93), published=published).ratio
    assert found(run_of(0.9), run_of(0.93), run_of(0.4), published=published).ratio == pytest.approx(right, rel=0.02)
    assert found(run_of(0.9), run_of(0.4), published=published).ratio == pytest.approx(right, rel=0.03)


def test_without_a_published_range_the_first_run_waits_for_a_second():
    assert correction(run_of(0.01), published=None) is None
    one = found(run_of(0.010), run_of(0.011), published=None)
    assert one.ratio == pytest.approx(0.0105, rel=0.01)
    assert one.bounds[1] == pytest.approx(math.exp(1.44 * REPEATED), rel=1e-3)


def test_many_runs_are_no_surer_than_the_surest():
    few, many = found(run_of(0.8), run_of(0.8)), found(*[run_of(0.8)] * 50)
    assert many.bounds == pytest.approx(few.bounds)


def test_a_step_is_a_doubling_or_a_word_that_differs():
    other = replace(CASE, numbers={**CASE.numbers, "running": 16, "input_tokens": 2000}, words={"model": "n"})
    assert CASE.steps(other) == 2 + 1 + 2
    assert CASE.steps(CASE) == 0


# -- in a plan

ENGINE = EngineConfig(tensor_parallel_size=1)
WORDS = ("8b", "-tp", "1", "--max-model-len", "4096", "--concurrency", "64")
ASKED = PlanRequest(model="8b", gpu="h100-80gb", engine=ENGINE, workload=Workload(max_model_len=4096, concurrency=64))


@pytest.fixture
def teach(tmp_path, monkeypatch):
    """Keep runs of the plan at so many in flight, with this ratio, in a home of their own."""
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))

    def keep(ratio: float, concurrency: int, times: int = 2) -> None:
        result = plan_for(replace(ASKED, measured=False))
        one = estimate(result, concurrency)
        case = case_of(one.roofline, one.traffic, one.batch)
        rate = one.expected.output_tokens_per_s
        for _ in range(times):
            run = MeasuredRun(case=case, tokens_per_s=ratio * rate, printed_tokens_per_s=rate)
            keep_run(default_home({"HPC_SERVE_HOME": str(tmp_path / "home")}), run)

    return keep


def estimate(result, concurrency: int) -> SpeedEstimate:
    (one,) = [one for one in result.estimates() if one.traffic.concurrency == concurrency]
    return one


def test_every_expected_figure_is_scaled_and_the_ideal_ones_are_not(teach):
    teach(0.8, 64)
    result, plain = plan_for(ASKED), plan_for(replace(ASKED, measured=False))
    mine, theirs = estimate(result, 64), estimate(plain, 64)
    ratio = mine.measured.ratio
    assert ratio == pytest.approx(0.8, rel=0.04)
    assert theirs.measured is None
    for name, power in (("output_tokens_per_s", 1), ("requests_per_s", 1), ("tpot_s", -1), ("ttft_s", -1)):
        assert getattr(mine.expected, name) == pytest.approx(getattr(theirs.expected, name) * ratio**power)
        assert getattr(mine.ideal, name) == getattr(theirs.ideal, name)
    assert mine.expected.step.total_s == pytest.approx(theirs.expected.step.total_s / ratio)
    assert mine.expected.bound == theirs.expected.bound
    assert mine.factors != EXPECTED
    assert estimate(result, 1).measured is None  # six doublings away


def test_the_plan_says_on_how_many_runs_it_rests_and_leaves_them_out_if_asked(teach, told, plan_json):
    words = (*WORDS, "--gpu", "h100-80gb")
    before = told(*words)
    teach(0.8, 64)
    assert "; measured here on 2 runs: × 0.82, for 1 of these 3 figures." in told(*words)
    assert "measured here" not in before
    assert told(*words, "--no-measured") == before
    explained = told(*words, "--explain")
    assert "All of these factors count what was measured here on 2 runs: × 0.82." in explained
    assert "The figures count what was measured here on 2 runs" in explained
    rows = plan_json(*words)["performance"]["by_concurrency"]
    assert [one["measured"]["runs"] for one in rows if one["concurrency"] == 64] == [2]
    assert "measured here" not in told(*words, "--ideal")


def test_the_comparison_and_the_page_say_so_too(teach, told, tmp_path):
    teach(0.8, 64)
    out = told(*WORDS, "--compare", "h100-80gb,h200")
    assert "h100-80gb: measured here on 2 runs: × 0.82." in out
    assert "h200: measured" not in out
    page = tmp_path / "plan.html"
    told(*WORDS, "--gpu", "h100-80gb", "--plot", str(page))
    assert "2 runs that were measured here correct the figures near them" in page.read_text()


def test_a_target_counts_them_too(teach, told):
    machines = ("--gpu", "h100-80gb", "--nodes", "1", "--gpus-per-node", "1")
    teach(0.7, 64)
    out = told("8b", *machines, "--target", "throughput", "--concurrency", "64", "--max-model-len", "4096")
    assert "This speed is corrected by 2 runs that were measured here (× 0.73)" in out


def test_an_option_that_changes_the_engine_makes_a_case_another_one():
    def case(**options) -> Case:
        result = plan_for(replace(ASKED, measured=False, engine=replace(ENGINE, **options)))
        one = estimate(result, 64)
        return case_of(one.roofline, one.traffic, one.batch)

    assert case().steps(case(max_num_seqs=200, gpu_memory_utilization=0.8)) == 0
    assert case().steps(case(enable_lora=True)) >= 1
    assert case().steps(case(enforce_eager=True)) >= 1
    assert case().steps(case(quantization="fp8")) >= 1
