"""Decoding alone and the ideal roofline: what is asked, what is printed, and that both are what they are called."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import EngineConfig, MemoryEstimate, accelerator, estimate_memory, model_from_config, resolve
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.speed.decode import critical_batch
from hpc_serve.plan.speed.estimate import estimate_speed
from hpc_serve.plan.speed.step import IDEAL, Roofline
from hpc_serve.plan.speed.traffic import Traffic


def prepared(name: str, gpu_name: str, ranks: int = 1, engine: EngineConfig | None = None) -> tuple[Roofline, Any]:
    engine = engine or EngineConfig()
    model, gpu = model_from_config(resolve(name).config, name=name), accelerator(gpu_name)
    memory: MemoryEstimate = estimate_memory(
        model, gpu, engine, tensor_parallel_size=ranks, pipeline_parallel_size=1, max_model_len=8192
    )
    layout = Layout(tensor_parallel_size=ranks, pipeline_parallel_size=1, num_nodes=1)
    return Roofline(model, gpu, engine, layout), memory


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", "--model", "8b", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def table(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The explanation up to its arithmetic."""
    return printed(capsys, *words, "--explain").partition(" Weights:")[0].partition("Speed of one replica")[0]


def performance(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "--model", "8b", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["performance"]
    return found


def test_the_formula_is_named_where_its_figures_are_table(capsys: pytest.CaptureFixture[str]) -> None:
    both, ideal = table(capsys, "--decode-only", "--ideal"), table(capsys, "--ideal")
    decode, plain = table(capsys, "--decode-only"), table(capsys)
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


def test_the_table_has_the_ideal_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = performance(capsys, "--ideal", "--usd-per-gpu-hour", "2")
    assert found["figures"] == "ideal"
    assert performance(capsys)["figures"] == "expected"
    for line in found["by_concurrency"]:
        assert line["output_tokens_per_s_per_gpu"] == line["ideal"]["output_tokens_per_s"]
        assert line["output_tokens_per_usd"] == line["ideal"]["output_tokens_per_s"] * 1800
        assert f"{line['ideal']['output_tokens_per_s']:,.0f}" in table(capsys, "--ideal")


def test_decoding_alone_is_a_step_for_each_token() -> None:
    roofline, memory = prepared("8b", "h100-80gb")
    traffic = Traffic(input_tokens=1000, output_tokens=48, concurrency=16, decode_only=True)
    estimate = estimate_speed(roofline, traffic, memory)
    for speed in (estimate.ideal, estimate.expected):
        assert speed.tpot_s == speed.step.total_s
        assert speed.output_tokens_per_s == pytest.approx(16 / speed.step.total_s)
        assert speed.requests_per_s * 48 == pytest.approx(speed.output_tokens_per_s)
        assert sum(speed.causes.values()) == pytest.approx(1)
    with_prompts = estimate_speed(roofline, replace(traffic, decode_only=False), memory)
    assert with_prompts.expected.output_tokens_per_s < estimate.expected.output_tokens_per_s
    assert with_prompts.ideal.output_tokens_per_s <= estimate.ideal.output_tokens_per_s


def test_an_ideal_step_is_the_books_formula() -> None:
    """Weights and cache over the bandwidth (part 7 of the scaling book): 16.06 GB less the table, 131,072 B a token."""
    roofline, _ = prepared("8b", "h100-80gb")
    weights = (8_030_261_248 - 128_256 * 4096) * 2
    step = roofline.decode(16, 1024, IDEAL)
    assert step.total_s == pytest.approx((weights + 16 * 1024 * 131_072) / 3.35e12, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "gpu", "critical"),
    [
        ("8b", "h100-80gb", 989.4e12 / 3.35e12),
        ("8b", "a100-80gb", 312e12 / 2.039e12),
        ("8b", "v5e", 197e12 / 820e9),
    ],
)
def test_the_critical_batch_of_a_dense_model_is_flops_over_bandwidth(name: str, gpu: str, critical: float) -> None:
    """With two bytes a weight and two operations for it, both cancel; the book has 240 for a v5e."""
    roofline, _ = prepared(name, gpu)
    assert critical_batch(roofline) == pytest.approx(critical, rel=0.02)


def test_experts_move_the_critical_batch_up() -> None:
    """The book: by experts over experts a token, 128 / 8 = 16, less what is dense."""
    dense = critical_batch(prepared("8b", "h100-80gb")[0])
    sparse = critical_batch(prepared("Qwen/Qwen3-30B-A3B", "h100-80gb")[0])
    assert dense
    assert sparse
    assert 8 * dense < sparse <= 16 * dense


def test_requests_that_wait_for_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--decode-only", "--concurrency", "2000", "--input-tokens", "2000", "--output-tokens", "100")
    assert "run at once, and the others wait" in table(capsys, *words)
    last = performance(capsys, *words)["by_concurrency"][-1]
    assert last["concurrency"] == 2000
    assert last["expected"]["queue_s"] == pytest.approx((2000 - last["running"]) / last["expected"]["requests_per_s"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--decode-only", "--arrivals", "burst"), "leave out --requests or --arrivals burst"),
        (("--decode-only", "--target", "ttft=2s"), "--decode-only has prompts read elsewhere"),
        (("--ideal", "--target", "throughput"), "what is expected of a real engine"),
    ],
)
def test_what_contradicts_itself(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "8b", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_target_for_replicas_that_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tokens/s in all" in printed(capsys, "--decode-only", "--target", "tpot=20ms", "--nodes", "1")


def test_decoding_alone_has_no_bursts() -> None:
    with pytest.raises(InvalidRequestError, match="leave out --requests or --arrivals burst"):
        Traffic(arrivals="burst", decode_only=True)


def test_an_explanation_says_which_figures_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    both = printed(capsys, "--explain", "--decode-only", "--ideal")
    assert "(decoding alone, " in both
    assert "Of all the ideal time: " in both
    assert "output tokens/s, decoding alone" not in both
    assert "Of all the time, prompts included: " in printed(capsys, "--explain")


def test_accelerators_compared_by_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--compare", "h100-80gb,mi300x", "--ideal", "--decode-only")
    assert "Ideal speed, requests of 1,024 tokens in and 256 out, decoding alone" in text
