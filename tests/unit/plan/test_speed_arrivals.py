"""Requests in a burst and requests in a steady stream: what is asked, what is printed, and that waiting counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import EngineConfig, MemoryEstimate, accelerator, estimate_memory, model_from_config, resolve
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.speed.estimate import estimate_speed
from hpc_serve.plan.speed.step import Roofline
from hpc_serve.plan.speed.traffic import Traffic

SMALL = ("--model", "8b", "--gpu", "l4", "--nodes", "1", "-tp", "2", "-pp", "1", "--max-model-len", "8192")


@pytest.fixture(scope="module")
def prepared() -> tuple[Roofline, MemoryEstimate]:
    model, gpu, engine = model_from_config(resolve("8b").config, name="8b"), accelerator("l4"), EngineConfig()
    memory = estimate_memory(model, gpu, engine, tensor_parallel_size=2, pipeline_parallel_size=1, max_model_len=8192)
    layout = Layout(tensor_parallel_size=2, pipeline_parallel_size=1, num_nodes=1)
    return Roofline(model, gpu, engine, layout), memory


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *SMALL, *words, "--explain"]) == 0
    return " ".join(capsys.readouterr().out.split())


def performance(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", *SMALL, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["performance"]
    return found


def test_both_formulas_are_named_where_their_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    steady, burst = printed(capsys), printed(capsys, "--arrivals", "burst")
    assert "steady arrivals: so many are always in flight" in steady
    assert "published sources of steady arrivals, each left out of the fit, are off by" in steady
    assert "in a burst: all arrive at once, answers of one length" in burst
    assert "published sources of bursts, each left out of the fit, are off by" in burst
    assert "answers of at most 2,000 tokens" in printed(
        capsys, "--arrivals", "burst", "--longest-output-tokens", "2000"
    )


def test_what_published_runs_of_its_classes_had_is_said_in_words_and_in_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, classes = printed(capsys), performance(capsys)["measured_classes"]
    ((name, figures),) = classes.items()
    assert name == "dense models in 16 bit on l4"
    low, high = figures["measured_by_printed"]
    assert f"Published runs of {name} had {low:g} to {high:g} times these tokens/s ({figures['rows']} rows" in text
    assert "without CUDA graphs had" in printed(capsys, "--enforce-eager")
    assert "Published runs" not in printed(capsys, "--decode-only")
    assert "Published runs" not in printed(capsys, "--ideal")


def test_how_long_the_first_requests_of_a_run_wait(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--concurrency", "16", "--input-tokens", "4000")
    burst = performance(capsys, *words, "--arrivals", "burst")["by_concurrency"]
    at_once = next(one for one in burst if one["concurrency"] == 16)["expected"]["ttft_s"]
    assert f"where 16 arrive at once, their TTFT is {at_once:,.1f} s on average" in printed(capsys, *words)
    assert "At the start of a run" not in printed(capsys, *words, "--arrivals", "burst")
    assert "At the start of a run" not in printed(capsys, *words, "--decode-only")


def test_more_requests_than_the_cache_holds_wait_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--concurrency", "1000", "--input-tokens", "2000", "--output-tokens", "100")
    text = printed(capsys, *words)
    assert "The cache holds" in text
    assert "run at once, and the others wait. TTFT includes the wait" in text
    last = performance(capsys, *words)["by_concurrency"][-1]
    assert (last["concurrency"], last["running"] < 200) == (1000, True)
    assert last["expected"]["queue_s"] == pytest.approx((1000 - last["running"]) / last["expected"]["requests_per_s"])
    assert last["expected"]["ttft_s"] > last["expected"]["queue_s"]


def test_a_burst_is_slower_than_a_steady_stream_and_its_first_tokens_come_sooner(
    prepared: tuple[Roofline, MemoryEstimate],
) -> None:
    for concurrency in (1, 16, 64, 1000):
        traffic = Traffic(input_tokens=500, output_tokens=200, concurrency=concurrency)
        steady = estimate_speed(prepared[0], traffic, prepared[1])
        burst = estimate_speed(prepared[0], replace(traffic, arrivals="burst"), prepared[1])
        assert burst.expected.output_tokens_per_s <= steady.expected.output_tokens_per_s * 1.001
        assert burst.ideal.output_tokens_per_s >= burst.expected.output_tokens_per_s
        assert burst.batch == steady.batch
        if burst.batch < concurrency:
            assert 0 < burst.expected.queue_s < steady.expected.queue_s


def test_causes_of_a_burst_are_shares(prepared: tuple[Roofline, MemoryEstimate]) -> None:
    traffic = Traffic(input_tokens=500, output_tokens=200, concurrency=1000, arrivals="burst")
    assert sum(estimate_speed(prepared[0], traffic, prepared[1]).expected.causes.values()) == pytest.approx(1)


def test_answers_of_different_length_keep_a_burst_longer(prepared: tuple[Roofline, MemoryEstimate]) -> None:
    def rate(longest: int | None) -> float:
        traffic = Traffic(output_tokens=200, concurrency=64, arrivals="burst", longest_output_tokens=longest)
        return estimate_speed(prepared[0], traffic, prepared[1]).expected.output_tokens_per_s

    assert rate(None) == rate(200) > rate(400) > rate(4000)


@pytest.mark.parametrize(
    "words",
    [
        ("--longest-output-tokens", "500"),
        ("--arrivals", "burst", "--output-tokens", "300", "--longest-output-tokens", "200"),
        ("--arrivals", "poisson"),
    ],
)
def test_what_is_refused(words: tuple[str, ...]) -> None:
    assert run(["plan", *SMALL, *words]) == 2


def test_arrivals_are_one_of_two() -> None:
    with pytest.raises(InvalidRequestError, match="use steady or burst"):
        Traffic(arrivals="poisson")  # type: ignore[arg-type]


@pytest.mark.parametrize("arrivals", ["steady", "burst"])
def test_what_is_in_the_cache_is_not_read_but_attended_to(
    prepared: tuple[Roofline, MemoryEstimate], arrivals: Any
) -> None:
    whole = Traffic(input_tokens=6000, output_tokens=100, concurrency=8, arrivals=arrivals)

    def seconds(traffic: Traffic) -> float:
        return 1 / estimate_speed(prepared[0], traffic, prepared[1]).expected.requests_per_s

    half = seconds(replace(whole, prefix_hits=0.5))
    shorter = seconds(replace(whole, input_tokens=3000))
    assert shorter < half < seconds(whole)
    assert seconds(replace(whole, prefix_hits=0.9)) < half
    # All but a token: a prompt is a step of one token, and the answers take the time.
    cached = estimate_speed(prepared[0], replace(whole, prefix_hits=0.99999, arrivals="steady"), prepared[1]).expected
    alone = estimate_speed(prepared[0], replace(whole, decode_only=True, arrivals="steady"), prepared[1]).expected
    assert cached.requests_per_s == pytest.approx(alone.requests_per_s, rel=0.1)


def test_a_share_of_the_cache_is_said_and_has_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "--prefix-hits", "0.6", "--input-tokens", "4096")
    assert "4,096 tokens in, 60 % of them cached, and 256 out" in said
    figures = performance(capsys, "--prefix-hits", "0.6")
    assert figures["prefix_hits"] == 0.6
    assert figures["range"] is None
    for words, why in (
        (("--prefix-hits", "1"), "not in the range"),
        (("--prefix-hits", "0.5", "--decode-only"), "without --decode-only"),
        (("--prefix-hits", "0.5", "--no-enable-prefix-caching"), "keeps no prefixes"),
    ):
        assert run(["plan", *SMALL, *words]) == 2
        assert why in capsys.readouterr().err


def test_a_burst_is_a_number_of_requests_and_not_the_size_of_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> dict[str, Any]:
        assert run(["plan", "8b", "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    burst, plain = planned("--requests", "1000"), planned()
    sizes = ("num_nodes", "gpus_per_node", "kv_cache_tokens")
    assert [burst[name] for name in sizes] == [plain[name] for name in sizes]
    assert burst["performance"]["arrivals"] == "burst"
    last = burst["performance"]["by_concurrency"][-1]
    assert last["concurrency"] == 1000
    assert last["running"] < 1000
    assert last["expected"]["queue_s"] > 0
    assert run(["plan", "8b", "--requests", "5", "--decode-only"]) != 0
    assert "leave out --requests or" in capsys.readouterr().err
