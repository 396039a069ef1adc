"""Requests in a burst, in a steady stream, and decoding alone: what is printed, and that waiting counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.speed.estimate import speed_column
from hpc_serve.plan.speed.step import EXPECTED, IDEAL
from hpc_serve.plan.speed.throughput import Traffic, critical_batch
from tests.support.plans import replica, roofline, speed

SMALL = ("8b", "--gpu", "l4", "--nodes", "1", "-tp", "2", "-pp", "1", "--max-model-len", "8192")
OF_8B = replica("8b", "l4", tp=2)
served = partial(speed, OF_8B)


@pytest.fixture
def printed(told):
    return lambda *words: told(*SMALL, *words, "--explain")


@pytest.fixture
def performance(plan_json):
    return lambda *words: plan_json(*SMALL, *words)["performance"]


def test_both_formulas_are_named_where_their_figures_are_printed(printed) -> None:
    steady, burst = printed(), printed("--arrivals", "burst")
    assert "steady arrivals: so many are always in flight" in steady
    assert "published sources of steady arrivals, each left out of the fit, are off by" in steady
    assert "in a burst: all arrive at once, answers of one length" in burst
    assert "published sources of bursts, each left out of the fit, are off by" in burst
    longest = printed("--arrivals", "burst", "--longest-output-tokens", "2000")
    assert "answers of at most 2,000 tokens" in longest


def test_what_published_runs_of_its_classes_had_is_said_in_words_and_in_json(printed, performance) -> None:
    text = printed()
    ((name, figures),) = performance()["measured_classes"].items()
    assert name == "dense models in 16 bit on l4"
    low, high = figures["measured_by_printed"]
    assert f"Published runs of {name} had {low:g} to {high:g} times these tokens/s ({figures['rows']} rows" in text
    assert "without CUDA graphs had" in printed("--enforce-eager")
    for option in ("--decode-only", "--ideal"):
        assert "Published runs" not in printed(option)


def test_how_long_the_first_requests_of_a_run_wait(printed, performance) -> None:
    words = ("--concurrency", "16", "--input-tokens", "4000")
    burst = performance(*words, "--arrivals", "burst")["by_concurrency"]
    at_once = next(one for one in burst if one["concurrency"] == 16)["expected"]["ttft_s"]
    assert f"where 16 arrive at once, their TTFT is {at_once:,.1f} s on average" in printed(*words)
    for other in (("--arrivals", "burst"), ("--decode-only",)):
        assert "At the start of a run" not in printed(*words, *other)


@pytest.mark.parametrize(("more", "said"), [((), ". TTFT includes the wait"), (("--decode-only",), "")])
def test_more_requests_than_the_cache_holds_wait_and_that_is_said(more, said, printed, performance) -> None:
    words = ("--concurrency", "1000", "--input-tokens", "2000", "--output-tokens", "100", *more)
    text = printed(*words)
    assert "The cache holds" in text
    assert f"run at once, and the others wait{said}" in text
    last = performance(*words)["by_concurrency"][-1]
    assert (last["concurrency"], last["running"] < 200) == (1000, True)
    assert last["expected"]["queue_s"] == pytest.approx((1000 - last["running"]) / last["expected"]["requests_per_s"])
    assert more or last["expected"]["ttft_s"] > last["expected"]["queue_s"]


def test_a_burst_is_slower_than_a_steady_stream_and_its_first_tokens_come_sooner() -> None:
    for concurrency in (1, 16, 64, 1000):
        steady, burst = (
            served(input_tokens=500, output_tokens=200, concurrency=concurrency, arrivals=arrivals)
            for arrivals in ("steady", "burst")
        )
        assert burst.expected.output_tokens_per_s <= steady.expected.output_tokens_per_s * 1.001
        assert burst.ideal.output_tokens_per_s >= burst.expected.output_tokens_per_s
        assert burst.batch == steady.batch
        if burst.batch < concurrency:
            assert 0 < burst.expected.queue_s < steady.expected.queue_s
    assert sum(burst.expected.causes.values()) == pytest.approx(1)


def test_answers_of_different_length_keep_a_burst_longer() -> None:
    def rate(longest: int | None) -> float:
        burst = served(output_tokens=200, concurrency=64, arrivals="burst", longest_output_tokens=longest)
        return burst.expected.output_tokens_per_s

    assert rate(None) == rate(200) > rate(400) > rate(4000)


def test_one_burst_takes_as_long_as_its_batch_and_more_bursts_longer() -> None:
    of_8b = roofline("8b")

    def burst_s(requests: int) -> float:
        traffic = Traffic(input_tokens=500, output_tokens=200, concurrency=requests, arrivals="burst")
        return requests / speed_column(of_8b, traffic, 64, EXPECTED).requests_per_s

    assert burst_s(64) >= 200 * of_8b.decode(64, 600).total_s
    assert burst_s(640) > 9 * burst_s(64) / 2


def test_short_answers_of_a_burst_take_as_long_as_steps() -> None:
    """The server reads the requests more slowly than the engine answers them."""
    burst = served(input_tokens=10, output_tokens=3, concurrency=500, arrivals="burst")
    assert burst.expected.tpot_s >= burst.expected.step.total_s


@pytest.mark.parametrize("arrivals", ["steady", "burst"])
def test_what_is_in_the_cache_is_not_read_but_attended_to(arrivals: Any) -> None:
    asked: dict[str, Any] = {"input_tokens": 6000, "output_tokens": 100, "concurrency": 8, "arrivals": arrivals}

    def rate(**fields: Any) -> float:
        return served(**asked | fields).expected.requests_per_s

    assert rate(input_tokens=3000) > rate(prefix_hits=0.5) > rate()
    assert rate(prefix_hits=0.9) > rate(prefix_hits=0.5)
    # All but a token: a prompt is a step of one token, and the answers take the time.
    cached, alone = rate(prefix_hits=0.99999, arrivals="steady"), rate(decode_only=True, arrivals="steady")
    assert cached == pytest.approx(alone, rel=0.1)


def test_a_share_of_the_cache_is_said_and_has_no_range(printed, performance) -> None:
    said = printed("--prefix-hits", "0.6", "--input-tokens", "4096")
    assert "4,096 tokens in, 60 % of them cached, and 256 out" in said
    figures = performance("--prefix-hits", "0.6")
    assert (figures["prefix_hits"], figures["range"]) == (0.6, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--prefix-hits 1", "not in the range"),
        ("--prefix-hits 0.5 --decode-only", "without --decode-only"),
        ("--prefix-hits 0.5 --no-enable-prefix-caching", "keeps no prefixes"),
        ("--longest-output-tokens 500", "The longest answer matters where all requests arrive at once"),
        ("--arrivals burst --output-tokens 300 --longest-output-tokens 200", "must be at least that"),
        ("--arrivals poisson", "is not one of"),
        ("--requests 5 --decode-only", "leave out --requests or"),
        ("--decode-only --arrivals burst", "leave out --requests or --arrivals burst"),
        ("--decode-only --target ttft=2s", "--decode-only has prompts read elsewhere"),
        ("--ideal --target throughput", "what is expected of a real engine"),
        ("--target throughput --replicas 2", "--target chooses the number of replicas"),
        ("--max-model-len 512 --input-tokens 600", "use a longer --max-model-len, or fewer tokens"),
    ],
)
def test_what_contradicts_itself(refused, words: str, why: str) -> None:
    assert why in refused(*SMALL, *words.split())


def test_arrivals_are_one_of_two() -> None:
    with pytest.raises(InvalidRequestError, match="use steady or burst"):
        Traffic(arrivals="poisson")  # type: ignore[arg-type]


def test_a_burst_is_a_number_of_requests_and_not_the_size_of_the_cache(plan_json) -> None:
    burst, plain = plan_json("8b", "--requests", "1000"), plan_json("8b")
    for name in ("num_nodes", "gpus_per_node", "kv_cache_tokens"):
        assert burst[name] == plain[name]
    assert burst["performance"]["arrivals"] == "burst"
    last = burst["performance"]["by_concurrency"][-1]
    assert last["concurrency"] == 1000
    assert last["running"] < 1000
    assert last["expected"]["queue_s"] > 0


# -- decoding alone, and the ideal roofline


@pytest.fixture
def table(told):
    """The explanation up to its arithmetic."""

    def before_arithmetic(*words: str) -> str:
        return told("8b", *words, "--explain").partition(" Weights:")[0].partition("Speed of one replica")[0]

    return before_arithmetic


@pytest.fixture
def speeds_of_8b(plan_json):
    return lambda *words: plan_json("8b", *words)["performance"]


def test_the_formula_is_named_where_its_figures_are_table(table) -> None:
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


def test_the_table_has_the_ideal_figures(table, speeds_of_8b) -> None:
    found, printed = speeds_of_8b("--ideal", "--usd-per-gpu-hour", "2"), table("--ideal")
    assert (found["figures"], speeds_of_8b()["figures"]) == ("ideal", "expected")
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
    ("gpu", "critical"), [("h100-80gb", 989.4e12 / 3.35e12), ("a100-80gb", 312e12 / 2.039e12), ("v5e", 197e12 / 820e9)]
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


def test_a_target_for_replicas_that_decode(told) -> None:
    assert "tokens/s in all" in told("8b", "--decode-only", "--target", "tpot=20ms", "--nodes", "1")


def test_an_explanation_says_which_figures_it_is_of(told) -> None:
    both = told("8b", "--explain", "--decode-only", "--ideal")
    assert "(decoding alone, " in both
    assert "Of all the ideal time: " in both
    assert "output tokens/s, decoding alone" not in both
    assert "Of all the time, prompts included: " in told("8b", "--explain")


def test_accelerators_compared_by_what_was_asked(told) -> None:
    text = told("8b", "--compare", "h100-80gb,mi300x", "--ideal", "--decode-only")
    assert "Ideal speed, requests of 1,024 tokens in and 256 out, decoding alone" in text
