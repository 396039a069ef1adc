"""Decoding alone and the ideal roofline: what is printed, and that both are what they are called."""

from __future__ import annotations

import pytest

from hpc_serve.plan.speed.step import IDEAL
from hpc_serve.plan.speed.throughput import critical_batch
from tests.support.plans import replica, roofline, speed
from tests.unit.plan.conftest import Plan, Told


@pytest.fixture
def table(told: Told) -> Told:
    """The explanation up to its arithmetic."""

    def before_arithmetic(*words: str) -> str:
        return told("8b", *words, "--explain").partition(" Weights:")[0].partition("Speed of one replica")[0]

    return before_arithmetic


@pytest.fixture
def performance(plan_json: Plan) -> Plan:
    return lambda *words: plan_json("8b", *words)["performance"]


def test_the_formula_is_named_where_its_figures_are_table(table: Told) -> None:
    both, ideal = table("--decode-only", "--ideal"), table("--ideal")
    decode, plain = table("--decode-only"), table()
    for text in (both, decode):
        assert "decoding alone: prompts are read elsewhere and take no time" in text
        assert "TTFT" not in text
    for text in (both, ideal):
        assert text.count("Ideal speed, requests of") == 1
        assert "Speed to expect" not in text
        assert "TOKENS/S PER GPU" in text
    assert "no published measurement is of decoding alone" in decode
    assert "TOKENS/S IDEAL PER GPU" in decode
    assert "decoding alone" not in plain + ideal
    assert "The critical batch" not in plain


def test_the_table_has_the_ideal_figures(table: Told, performance: Plan) -> None:
    found, printed = performance("--ideal", "--usd-per-gpu-hour", "2"), table("--ideal")
    assert (found["figures"], performance()["figures"]) == ("ideal", "expected")
    for line in found["by_concurrency"]:
        rate = line["ideal"]["output_tokens_per_s"]
        assert line["output_tokens_per_s_per_gpu"] == rate
        assert line["output_tokens_per_usd"] == rate * 1800
        assert f"{rate:,.0f}" in printed


def test_decoding_alone_is_a_step_for_each_token() -> None:
    alone, with_prompts = (
        speed(replica("8b"), input_tokens=1000, output_tokens=48, concurrency=16, decode_only=only)
        for only in (True, False)
    )
    for found in (alone.ideal, alone.expected):
        assert found.tpot_s == found.step.total_s
        assert found.output_tokens_per_s == pytest.approx(16 / found.step.total_s)
        assert found.requests_per_s * 48 == pytest.approx(found.output_tokens_per_s)
        assert sum(found.causes.values()) == pytest.approx(1)
    assert with_prompts.expected.output_tokens_per_s < alone.expected.output_tokens_per_s
    assert with_prompts.ideal.output_tokens_per_s <= alone.ideal.output_tokens_per_s


def test_an_ideal_step_is_the_books_formula() -> None:
    """Weights and cache over the bandwidth (part 7 of the scaling book): 16.06 GB less the table, 131,072 B a token."""
    weights = (8_030_261_248 - 128_256 * 4096) * 2
    step = roofline("8b").decode(16, 1024, IDEAL)
    assert step.total_s == pytest.approx((weights + 16 * 1024 * 131_072) / 3.35e12, rel=2e-3)


@pytest.mark.parametrize(
    ("gpu", "critical"),
    [("h100-80gb", 989.4e12 / 3.35e12), ("a100-80gb", 312e12 / 2.039e12), ("v5e", 197e12 / 820e9)],
)
def test_the_critical_batch_of_a_dense_model_is_flops_over_bandwidth(gpu: str, critical: float) -> None:
    """With two bytes a weight and two operations for it, both cancel; the book has 240 for a v5e."""
    of_8b = roofline("8b", gpu)
    batch = critical_batch(of_8b) or 0
    assert batch == pytest.approx(critical, rel=0.02)
    below, there = (of_8b.decode(count, 1, IDEAL) for count in (batch - 1, batch))
    assert (below.flops_s < below.weights_s, there.flops_s >= there.weights_s) == (True, True)


def test_experts_move_the_critical_batch_up() -> None:
    """The book: by experts over experts a token, 128 / 8 = 16, less what is dense."""
    dense, sparse = (critical_batch(roofline(name)) for name in ("8b", "Qwen/Qwen3-30B-A3B"))
    assert dense
    assert sparse
    assert 8 * dense < sparse <= 16 * dense


def test_requests_that_wait_for_decoding(table: Told, performance: Plan) -> None:
    words = ("--decode-only", "--concurrency", "2000", "--input-tokens", "2000", "--output-tokens", "100")
    assert "run at once, and the others wait" in table(*words)
    last = performance(*words)["by_concurrency"][-1]
    assert last["concurrency"] == 2000
    assert last["expected"]["queue_s"] == pytest.approx((2000 - last["running"]) / last["expected"]["requests_per_s"])


def test_a_target_for_replicas_that_decode(told: Told) -> None:
    assert "tokens/s in all" in told("8b", "--decode-only", "--target", "tpot=20ms", "--nodes", "1")


def test_an_explanation_says_which_figures_it_is_of(told: Told) -> None:
    both = told("8b", "--explain", "--decode-only", "--ideal")
    assert "(decoding alone, " in both
    assert "Of all the ideal time: " in both
    assert "output tokens/s, decoding alone" not in both
    assert "Of all the time, prompts included: " in told("8b", "--explain")


def test_accelerators_compared_by_what_was_asked(told: Told) -> None:
    text = told("8b", "--compare", "h100-80gb,mi300x", "--ideal", "--decode-only")
    assert "Ideal speed, requests of 1,024 tokens in and 256 out, decoding alone" in text
