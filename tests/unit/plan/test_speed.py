"""Counting work and turning it into times: on figures that can be worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import (
    ClusterSpec,
    EngineConfig,
    MemoryEstimate,
    ModelSpec,
    Workload,
    accelerator,
    estimate_memory,
    model_from_config,
    resolve,
)
from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.speed.estimate import estimate_speed, speed_column
from hpc_serve.plan.speed.links import link_rate
from hpc_serve.plan.speed.step import EXPECTED, IDEAL, Roofline
from hpc_serve.plan.speed.target import SpeedTarget, choose_deployment, parse_speed_target
from hpc_serve.plan.speed.traffic import Traffic
from hpc_serve.plan.speed.work import compute_type, model_work

H100 = accelerator("h100-80gb")


def spec(name: str, quantization: str | None = None) -> ModelSpec:
    return model_from_config(resolve(name).config, name=name, quantization=quantization)


def layout(tensor: int = 1, pipeline: int = 1, nodes: int = 1) -> Layout:
    return Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        num_nodes=nodes,
    )


def prepared(name: str, tensor: int, pipeline: int = 1, nodes: int = 1) -> tuple[Roofline, MemoryEstimate]:
    model, engine = spec(name), EngineConfig()
    memory = estimate_memory(
        model, H100, engine, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, max_model_len=8192
    )
    return Roofline(model, H100, engine, layout(tensor, pipeline, nodes)), memory


@pytest.mark.parametrize(("name", "tensor"), [("70b", 1), ("70b", 8), ("qwen3-32b", 4)])
def test_a_dense_model_computes_twice_its_matrices_for_each_token(name: str, tensor: int) -> None:
    model = spec(name)
    stage = model_work(model, H100, EngineConfig(), layout(tensor)).stages[0]
    counted = tensor * (sum(stage.dense_flops.values()) + stage.head_flops)
    assert counted == pytest.approx(2 * (model.parameters - model.embedding.parameters), rel=1e-3)


def test_stages_add_up_to_the_model() -> None:
    one, two = (model_work(spec("405b"), H100, EngineConfig(), layout(8, stages)).stages for stages in (1, 2))
    assert sum(stage.dense_flops["bf16"] for stage in two) == one[0].dense_flops["bf16"]
    assert sum(stage.dense_bytes for stage in two) == pytest.approx(one[0].dense_bytes, rel=1e-3)
    assert [stage.head_flops > 0 for stage in two] == [False, True]


def test_experts_are_read_as_they_are_hit() -> None:
    stage = model_work(spec("gpt-oss-20b"), H100, EngineConfig(), layout()).stages[0]
    assert stage.share_of_experts(1) == pytest.approx(4 / 32)
    assert stage.share_of_experts(1000) == pytest.approx(1)
    assert stage.share_of_experts(8) == pytest.approx(1 - (28 / 32) ** 8)
    assert stage.weight_bytes(0) == stage.dense_bytes


def test_a_window_bounds_what_is_read() -> None:
    stage = model_work(spec("gpt-oss-20b"), H100, EngineConfig(), layout()).stages[0]
    windowed, full = sorted(stage.attention, key=lambda part: part.window, reverse=True)
    assert (windowed.window, full.window) == (128, 0)
    growth = stage.cache_bytes(2000) - stage.cache_bytes(1000)
    assert growth == 1000 * full.count * full.bytes_per_token


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    one, eight = (model_work(spec("deepseek-v3"), H100, EngineConfig(), layout(ranks)).stages[0] for ranks in (1, 8))
    assert one.cache_bytes(1000) == eight.cache_bytes(1000) == 61 * 1000 * 576 * 2
    assert one.attention[0].decode_flops == 2 * 128 * (576 + 512)
    assert one.attention[0].prefill_flops == 2 * 128 * (192 + 128)


@pytest.mark.parametrize(
    ("gpu", "quantization", "expected"),
    [
        ("h100", "fp8", "fp8"),
        ("a100", "fp8", "bf16"),
        ("h100", "awq", "bf16"),
        ("a100", "int8", "bf16"),
        ("b200", "nvfp4", "fp4"),
        ("h100", "mxfp4", "bf16"),
        ("v100", None, "fp16"),
    ],
)
def test_type_of_the_multiplication(gpu: str, quantization: str | None, expected: str) -> None:
    model = spec("8b", quantization)
    scheme = model.quantization.experts if quantization == "mxfp4" else model.quantization.linear
    assert compute_type(scheme, model, accelerator(gpu)) == expected


def test_one_sequence_is_bound_by_weights_and_a_large_batch_by_flops() -> None:
    roofline, _ = prepared("8b", 1)
    alone = roofline.decode(1, 100, IDEAL)
    stage = roofline.work.stages[0]
    assert alone.weights_s == pytest.approx(stage.dense_bytes / 3.35e12)
    assert (alone.bound, roofline.decode(2000, 1, IDEAL).bound) == ("weights", "FLOP/s")
    assert roofline.decode(64, 60_000, IDEAL).bound == "KV cache"


def test_stages_work_one_after_the_other_on_shares_of_the_batch() -> None:
    whole, _ = prepared("70b", 8)
    staged, _ = prepared("70b", 8, 2, 2)
    one, two = whole.decode(64, 1000, IDEAL), staged.decode(64, 1000, IDEAL)
    assert two.weights_s == pytest.approx(one.weights_s, rel=1e-3)
    assert two.cache_s == pytest.approx(one.cache_s / 2)
    assert staged.hop_bytes_per_s == 50e9


def test_one_prompt_passes_the_stages_one_after_the_other() -> None:
    """Two stages of four GPUs each take as long for a prompt as one of four, but for a hop."""
    whole, memory = prepared("70b", 4)
    staged, _ = prepared("70b", 4, 2, 2)
    traffic = Traffic(input_tokens=4000)
    one, two = (estimate_speed(roofline, traffic, memory).ideal.ttft_s for roofline in (whole, staged))
    assert two == pytest.approx(one, rel=0.05)


def test_links_of_pairs_are_few_between_few() -> None:
    mesh = accelerator("mi300x")
    assert link_rate(mesh, layout(2)) == pytest.approx(64e9)
    assert link_rate(mesh, layout(8)) == pytest.approx(448e9)
    assert link_rate(accelerator("h100-94gb"), layout(2)) == 300e9
    assert link_rate(accelerator("h100-94gb"), layout(4)) == 32e9
    assert link_rate(H100, layout(2)) == 450e9
    assert link_rate(H100, layout(16, 1, 2)) == 50e9


def test_queues_follow_littles_law() -> None:
    roofline, memory = prepared("70b", 4)
    estimate = estimate_speed(roofline, Traffic(concurrency=5000), memory)
    speed = estimate.expected
    assert estimate.batch == pytest.approx(min(estimate.capacity, roofline.max_num_seqs))
    in_engine = speed.requests_per_s * (speed.ttft_s - speed.queue_s + 255 * speed.tpot_s)
    assert in_engine == pytest.approx(estimate.batch, rel=0.01)
    assert speed.requests_per_s * speed.queue_s == pytest.approx(5000 - estimate.batch)


def test_no_token_comes_sooner_than_a_step_takes() -> None:
    roofline, memory = prepared("70b", 4)
    for inputs in (100, 1000, 7000):
        estimate = estimate_speed(roofline, Traffic(input_tokens=inputs), memory)
        for speed in (estimate.ideal, estimate.expected):
            assert speed.tpot_s >= speed.step.total_s * (1 - 1e-9)
    alone = estimate_speed(roofline, Traffic(), memory).expected
    assert alone.tpot_s == pytest.approx(alone.step.total_s, rel=0.01)
    assert alone.output_tokens_per_s == pytest.approx(256 / (alone.ttft_s + 255 * alone.tpot_s), rel=0.01)


def test_more_in_flight_is_never_fewer_tokens_nor_a_shorter_wait() -> None:
    roofline, memory = prepared("70b", 4)
    found = [estimate_speed(roofline, Traffic(concurrency=2**power), memory).expected for power in range(12)]
    rates = [speed.output_tokens_per_s for speed in found]
    waits = [speed.ttft_s for speed in found]
    assert rates == sorted(rates)
    assert waits == sorted(waits)


def test_one_burst_takes_as_long_as_its_batch_and_varied_answers_longer() -> None:
    roofline, _ = prepared("8b", 1)

    def burst_s(requests: int, longest: int | None = None) -> float:
        traffic = Traffic(
            input_tokens=500,
            output_tokens=200,
            concurrency=requests,
            arrivals="burst",
            longest_output_tokens=longest,
        )
        return requests / speed_column(roofline, traffic, 64, EXPECTED).requests_per_s

    alike = burst_s(64)
    assert alike >= 200 * roofline.decode(64, 600).total_s
    assert burst_s(64, longest=100_000) > alike
    assert burst_s(640) > 9 * alike / 2


def test_an_accelerator_of_unknown_speed_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no source confirms"):
        Roofline(spec("8b"), accelerator("h100-64gb"), EngineConfig(), layout())


@pytest.mark.parametrize("text", ["tpot=50", "fast", "tpot=0ms", "tpot=-1ms", "", "tpot=50ms;ttft=1s"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="write throughput"):
        parse_speed_target(text)


def test_targets() -> None:
    assert parse_speed_target("throughput") == SpeedTarget()
    assert parse_speed_target("tpot=50ms, ttft=1.5s") == SpeedTarget(tpot_s=0.05, ttft_s=1.5)


def inputs(name: str, gpu: str = "h100-80gb", max_model_len: int = 8192) -> PlanInputs:
    return PlanInputs(
        model=spec(name),
        cluster=ClusterSpec(accelerator=accelerator(gpu)),
        engine=EngineConfig(),
        workload=Workload(max_model_len=max_model_len),
        max_model_len=max_model_len,
    )


def test_small_replicas_win_on_throughput_and_a_wide_one_on_latency() -> None:
    many, reasons = choose_deployment(inputs("8b"), Traffic(), SpeedTarget())
    assert (many.replicas, many.layout.tensor_parallel_size) == (8, 1)
    assert any(reason.startswith("Not one TP=8") for reason in reasons)
    fast, _ = choose_deployment(inputs("8b"), Traffic(), SpeedTarget(tpot_s=0.0055))
    assert fast.layout.tensor_parallel_size > 1
    assert fast.estimate.expected.tpot_s <= 0.0055


def test_the_batch_is_as_large_as_the_target_allows() -> None:
    target = SpeedTarget(tpot_s=0.030)
    option, _ = choose_deployment(inputs("70b"), Traffic(), target)
    traffic = option.estimate.traffic
    roofline = Roofline(spec("70b"), H100, EngineConfig(), option.layout)
    more = estimate_speed(roofline, replace(traffic, concurrency=traffic.concurrency + 1), option.memory)
    assert target.is_met(option.estimate)
    assert not target.is_met(more)


def test_what_cannot_be_reached_says_how_near_it_is() -> None:
    with pytest.raises(DoesNotFitError, match=r"nearest is .* ms between tokens"):
        choose_deployment(inputs("405b-fp8"), Traffic(), SpeedTarget(tpot_s=0.001))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_command_says_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--model", "8b", "--usd-per-gpu-hour", "2", "--explain")
    assert re.search(r"IN FLIGHT +TTFT +TPOT +TOKENS/S +IDEAL +PER GPU +PER \$ +BOUND BY", shown)
    explained = printed(capsys, "--model", "8b", "--explain")
    assert "ideal    expected" in explained
    assert f"{100 * EXPECTED.bandwidth:.0f} % of the memory bandwidth (fitted" in explained
    document = json.loads(printed(capsys, "--model", "8b", "--json", "--concurrency", "8"))
    by_concurrency = {row["concurrency"]: row for row in document["performance"]["by_concurrency"]}
    assert by_concurrency[8]["ideal"]["tpot_s"] < by_concurrency[8]["expected"]["tpot_s"]


def test_the_command_chooses_for_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "8b", "--max-model-len", "8192", "--target", "throughput", "--json")
    document = json.loads(printed(capsys, *words))
    assert (document["replicas"], document["tensor_parallel_size"]) == (8, 1)
    assert document["reasons"][0].startswith("For throughput: 8 replicas of TP=1")


def test_a_checkpoint_in_int8_is_multiplied_in_int8() -> None:
    config = {**resolve("8b").config, "quantization_config": {"quant_method": "int8"}}
    model = model_from_config(config, name="8b-int8")
    assert compute_type(model.quantization.linear, model, accelerator("a100")) == "int8"


def test_the_width_beyond_which_links_bind_is_a_reason() -> None:
    _, reasons = choose_deployment(inputs("70b", "v5e"), Traffic(), SpeedTarget())
    assert any("C ÷ W_ici" in reason for reason in reasons)
    _, reasons = choose_deployment(inputs("70b"), Traffic(), SpeedTarget())
    assert any("all-reduces" in reason for reason in reasons)


def test_accelerators_are_compared_by_speed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--model", "8b", "--compare", "h100,a100,h100-64gb", "--max-model-len", "8192")
    rates = {row.split()[0]: row.split()[-1] for row in shown.splitlines() if re.match(r"[ah]100-", row)}
    assert int(rates["h100-80gb"].replace(",", "")) > int(rates["a100-80gb"].replace(",", ""))
    assert rates["h100-64gb"] == "?"


def test_the_command_takes_slices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "70b", "--gpu", "v5e:4x4", "--max-model-len", "8192", "--json")
    document = json.loads(printed(capsys, *words))
    assert document["num_nodes"] * document["gpus_per_node"] == 16


def test_the_command_takes_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-2-7b", "--gpu", "cpu-spr-2s", "--gpu-memory", "256GiB", "--target", "tpot=60ms")
    shown = printed(capsys, *words, "--explain")
    assert "fitted on GPUs and TPUs, on no CPU" in " ".join(shown.split())
    assert "one TP=2 PP=1" in shown or "2 replicas of TP=1" in shown


def test_it_says_where_no_speed_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "8b", "--gpu", "h100-64gb")
    assert "no source confirms" in printed(capsys, *words)
    assert json.loads(printed(capsys, *words, "--json"))["performance"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("--gpu", "v5e:3x3"),
        ("--gpu", "h100:2x2"),
        ("--target", "cheap"),
        ("--target", "throughput", "--replicas", "2"),
        ("--max-model-len", "512", "--input-tokens", "600"),
        ("--plot", "plan.gif"),
    ],
)
def test_what_the_command_refuses(words: tuple[str, ...]) -> None:
    assert run(["plan", "--model", "8b", *words]) == 2


def test_a_target_out_of_reach_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "405b", "--target", "tpot=1ms"]
    assert run(words) == 3
    assert "the nearest is" in capsys.readouterr().err
    assert run([*words, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    "name",
    ["8b", "70b", "405b", "deepseek-r1", "gpt-oss-20b", "gemma-3-27b", "Qwen/Qwen3-Next-80B-A3B-Instruct"],
)
@pytest.mark.parametrize("gpu", ["h100", "a100", "mi300x", "v6e", "l40s"])
def test_a_target_is_met_by_what_is_chosen_or_refused(name: str, gpu: str) -> None:
    target = SpeedTarget(tpot_s=0.1)
    try:
        option, reasons = choose_deployment(inputs(name, gpu, 4096), Traffic(), target)
    except DoesNotFitError:
        return
    assert target.is_met(option.estimate)
    assert option.estimate.ideal.tpot_s <= option.estimate.expected.tpot_s
    assert reasons[0].startswith("For throughput within a tpot of 100 ms: ")
