"""Requests in a burst and requests in a steady stream: what is asked, what is printed, and that waiting counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.speed.estimate import speed_column
from hpc_serve.plan.speed.step import EXPECTED
from hpc_serve.plan.speed.throughput import Traffic
from tests.support.plans import replica, roofline, speed
from tests.unit.plan.conftest import Plan, Told

SMALL = ("8b", "--gpu", "l4", "--nodes", "1", "-tp", "2", "-pp", "1", "--max-model-len", "8192")
OF_8B = replica("8b", "l4", tp=2)
served = partial(speed, OF_8B)


@pytest.fixture
def printed(told: Told) -> Told:
    return lambda *words: told(*SMALL, *words, "--explain")


@pytest.fixture
def performance(plan_json: Plan) -> Plan:
    return lambda *words: plan_json(*SMALL, *words)["performance"]


def test_both_formulas_are_named_where_their_figures_are_printed(printed: Told) -> None:
    steady, burst = printed(), printed("--arrivals", "burst")
    assert "steady arrivals: so many are always in flight" in steady
    assert "published sources of steady arrivals, each left out of the fit, are off by" in steady
    assert "in a burst: all arrive at once, answers of one length" in burst
    assert "published sources of bursts, each left out of the fit, are off by" in burst
    longest = printed("--arrivals", "burst", "--longest-output-tokens", "2000")
    assert "answers of at most 2,000 tokens" in longest


def test_what_published_runs_of_its_classes_had_is_said_in_words_and_in_json(printed: Told, performance: Plan) -> None:
    text = printed()
    ((name, figures),) = performance()["measured_classes"].items()
    assert name == "dense models in 16 bit on l4"
    low, high = figures["measured_by_printed"]
    assert f"Published runs of {name} had {low:g} to {high:g} times these tokens/s ({figures['rows']} rows" in text
    assert "without CUDA graphs had" in printed("--enforce-eager")
    for option in ("--decode-only", "--ideal"):
        assert "Published runs" not in printed(option)


def test_how_long_the_first_requests_of_a_run_wait(printed: Told, performance: Plan) -> None:
    words = ("--concurrency", "16", "--input-tokens", "4000")
    burst = performance(*words, "--arrivals", "burst")["by_concurrency"]
    at_once = next(one for one in burst if one["concurrency"] == 16)["expected"]["ttft_s"]
    assert f"where 16 arrive at once, their TTFT is {at_once:,.1f} s on average" in printed(*words)
    for other in (("--arrivals", "burst"), ("--decode-only",)):
        assert "At the start of a run" not in printed(*words, *other)


def test_more_requests_than_the_cache_holds_wait_and_that_is_said(printed: Told, performance: Plan) -> None:
    words = ("--concurrency", "1000", "--input-tokens", "2000", "--output-tokens", "100")
    text = printed(*words)
    assert "The cache holds" in text
    assert "run at once, and the others wait. TTFT includes the wait" in text
    last = performance(*words)["by_concurrency"][-1]
    assert (last["concurrency"], last["running"] < 200) == (1000, True)
    assert last["expected"]["queue_s"] == pytest.approx((1000 - last["running"]) / last["expected"]["requests_per_s"])
    assert last["expected"]["ttft_s"] > last["expected"]["queue_s"]


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


def test_a_share_of_the_cache_is_said_and_has_no_range(printed: Told, performance: Plan) -> None:
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
def test_what_contradicts_itself(refused: Told, words: str, why: str) -> None:
    assert why in refused(*SMALL, *words.split())


def test_arrivals_are_one_of_two() -> None:
    with pytest.raises(InvalidRequestError, match="use steady or burst"):
        Traffic(arrivals="poisson")  # type: ignore[arg-type]


def test_a_burst_is_a_number_of_requests_and_not_the_size_of_the_cache(plan_json: Plan) -> None:
    burst, plain = plan_json("8b", "--requests", "1000"), plan_json("8b")
    for name in ("num_nodes", "gpus_per_node", "kv_cache_tokens"):
        assert burst[name] == plain[name]
    assert burst["performance"]["arrivals"] == "burst"
    last = burst["performance"]["by_concurrency"][-1]
    assert last["concurrency"] == 1000
    assert last["running"] < 1000
    assert last["expected"]["queue_s"] > 0
