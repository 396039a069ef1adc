"""Counting work and turning it into times, on figures that can be worked out by hand; and what pipeline stages cost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import accelerator
from hpc_serve.plan.speed.estimate import speed_column
from hpc_serve.plan.speed.step import ASYNC_KERNELS, EXPECTED, IDEAL, Roofline, StepTime, link_rate
from hpc_serve.plan.speed.throughput import Traffic, share_ending_per_step
from hpc_serve.plan.speed.work import EXPERT_KERNELS, LATENT_KERNELS, LAYER_KERNELS, StageWork, compute_type
from tests.support.plans import changed, layout, replica, roofline, spec, speed

H100 = accelerator("h100-80gb")
DEVICE = replace(EXPECTED, sequence_s=0)


def stages(name: str, tp: int = 1, pp: int = 1) -> tuple[StageWork, ...]:
    return roofline(name, tp=tp, pp=pp).work.stages


def staged(name: str, pp: int = 1, version: str = "0.12.0") -> Roofline:
    """The stages of eight GPUs each on a node of their own."""
    return roofline(name, tp=8, pp=pp, nodes=pp, vllm_version=version)


def bound(step: StepTime) -> str:
    return max(step.causes, key=lambda cause: step.causes[cause])


@pytest.mark.parametrize(("name", "tensor"), [("70b", 1), ("70b", 8), ("qwen3-32b", 4)])
def test_a_dense_model_computes_twice_its_matrices_for_each_token(name: str, tensor: int) -> None:
    model, stage = spec(name), stages(name, tensor)[0]
    counted = tensor * (sum(stage.dense_flops.values()) + stage.head_flops)
    assert counted == pytest.approx(2 * (model.parameters - model.embedding.parameters), rel=1e-3)


def test_stages_add_up_to_the_model() -> None:
    (one,), two = stages("405b", 8), stages("405b", 8, 2)
    assert sum(stage.dense_flops["bf16"] for stage in two) == one.dense_flops["bf16"]
    assert sum(stage.dense_bytes for stage in two) == pytest.approx(one.dense_bytes, rel=1e-3)
    assert [stage.head_flops > 0 for stage in two] == [False, True]


def test_experts_are_read_as_they_are_hit_and_a_window_bounds_what_is_read() -> None:
    (stage,) = stages("gpt-oss-20b")
    for tokens, share in ((1, 4 / 32), (8, 1 - (28 / 32) ** 8), (1000, 1)):
        assert stage.share_of_experts(tokens) == pytest.approx(share)
    assert stage.weight_bytes(0) == stage.dense_bytes
    windowed, full = sorted(stage.attention, key=lambda part: part.window, reverse=True)
    assert (windowed.window, full.window) == (128, 0)
    assert stage.cache_bytes(2000) - stage.cache_bytes(1000) == 1000 * full.count * full.bytes_per_token


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    one, eight = (stages("deepseek-v3", ranks)[0] for ranks in (1, 8))
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
    model = spec("8b", quantization=quantization)
    scheme = model.quantization.experts if quantization == "mxfp4" else model.quantization.linear
    assert compute_type(scheme, model, accelerator(gpu)) == expected


def test_a_checkpoint_in_int8_is_multiplied_in_int8() -> None:
    model = changed("8b", quantization_config={"quant_method": "int8"})
    assert compute_type(model.quantization.linear, model, accelerator("a100")) == "int8"


def test_one_sequence_is_bound_by_weights_and_a_large_batch_by_flops() -> None:
    of_8b = roofline("8b")
    alone = of_8b.decode(1, 100, IDEAL)
    assert alone.weights_s == pytest.approx(of_8b.work.stages[0].dense_bytes / 3.35e12)
    steps = (alone, of_8b.decode(2000, 1, IDEAL), of_8b.decode(64, 60_000, IDEAL))
    assert list(map(bound, steps)) == ["weights", "FLOP/s", "KV cache"]


def test_stages_work_one_after_the_other_on_shares_of_the_batch() -> None:
    """Two stages of four GPUs each take as long for a prompt as one of four, but for a hop."""
    of_two = roofline("70b", tp=8, pp=2, nodes=2)
    one, two = (found.decode(64, 1000, IDEAL) for found in (roofline("70b", tp=8), of_two))
    assert two.weights_s == pytest.approx(one.weights_s, rel=1e-3)
    assert two.cache_s == pytest.approx(one.cache_s / 2)
    assert of_two.hop_bytes_per_s == 50e9
    one_s, two_s = (speed(replica("70b", tp=4, pp=pp, nodes=pp), input_tokens=4000).ideal.ttft_s for pp in (1, 2))
    assert two_s == pytest.approx(one_s, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "tp", "nodes", "rate"),
    [
        ("mi300x", 2, 1, 64e9),
        ("mi300x", 8, 1, 448e9),
        ("h100-94gb", 2, 1, 300e9),
        ("h100-94gb", 4, 1, 32e9),
        ("h100-80gb", 2, 1, 450e9),
        ("h100-80gb", 16, 2, 50e9),
    ],
)
def test_links_of_pairs_are_few_between_few(gpu: str, tp: int, nodes: int, rate: float) -> None:
    assert link_rate(accelerator(gpu), layout(tp, nodes=nodes)) == pytest.approx(rate)


def test_queues_follow_littles_law() -> None:
    of_70b = replica("70b", tp=4)
    estimate = of_70b.at(5000)
    found = estimate.expected
    assert estimate.batch == pytest.approx(min(estimate.capacity, of_70b.roofline.max_num_seqs))
    in_engine = found.requests_per_s * (found.ttft_s - found.queue_s + 255 * found.tpot_s)
    assert in_engine == pytest.approx(estimate.batch, rel=0.01)
    assert found.requests_per_s * found.queue_s == pytest.approx(5000 - estimate.batch)


def test_no_token_comes_sooner_than_a_step_takes() -> None:
    of_70b = replica("70b", tp=4)
    for inputs in (100, 1000, 7000):
        estimate = speed(of_70b, input_tokens=inputs)
        for found in (estimate.ideal, estimate.expected):
            assert found.tpot_s >= found.step.total_s * (1 - 1e-9)
    alone = of_70b.at(1).expected
    assert alone.tpot_s == pytest.approx(alone.step.total_s, rel=0.01)
    assert alone.output_tokens_per_s == pytest.approx(256 / (alone.ttft_s + 255 * alone.tpot_s), rel=0.01)


def test_more_in_flight_is_never_fewer_tokens_nor_a_shorter_wait() -> None:
    of_70b = replica("70b", tp=4)
    found = [of_70b.at(2**power).expected for power in range(12)]
    for figures in ([one.output_tokens_per_s for one in found], [one.ttft_s for one in found]):
        assert figures == sorted(figures)


def test_an_accelerator_of_unknown_speed_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no source confirms"):
        roofline("8b", "h100-64gb")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("70b", 80 * LAYER_KERNELS),
        ("qwen3-235b", 94 * (LAYER_KERNELS + EXPERT_KERNELS)),
        ("deepseek-r1", 61 * (LAYER_KERNELS + LATENT_KERNELS) + 58 * EXPERT_KERNELS),
    ],
)
def test_kernels_are_counted_by_the_kind_of_layer(name: str, kernels: int) -> None:
    for pp in (1, 2):
        assert sum(stage.kernels for stage in staged(name, pp).work.stages) == kernels


def test_kernels_take_their_time_whatever_the_batch() -> None:
    for batch in (1, 256):
        assert staged("70b").decode(batch, 1024, DEVICE).engine_s == pytest.approx(800 * EXPECTED.kernel_s)


def test_work_on_the_host_hides_behind_the_device_where_scheduling_is_asynchronous() -> None:
    before, since = staged("8b"), staged("8b", version="0.14.0")
    kernels = 32 * LAYER_KERNELS * EXPECTED.kernel_s
    assert before.decode(64, 1024).engine_s == pytest.approx(kernels + 64 * EXPECTED.sequence_s)
    assert since.decode(64, 1024).engine_s == pytest.approx(kernels * ASYNC_KERNELS)
    slow = replace(EXPECTED, sequence_s=1e-3)
    assert since.decode(64, 1024, slow).total_s == pytest.approx(64 * 1e-3)


def test_scheduling_is_asynchronous_by_default_since_014_and_over_stages_since_032() -> None:
    asked = [(version, pp) for version in ("0.13.0", "0.14.0", "0.32.0") for pp in (1, 2)]
    on = [(version, pp) for version, pp in asked if staged("70b", pp, version).async_scheduling]
    assert on == [("0.14.0", 1), ("0.32.0", 1), ("0.32.0", 2)]


def test_attention_has_a_share_of_the_peak_of_its_own() -> None:
    one = staged("8b")
    whole, half = (
        one.step(8192, 0, 8192, replace(EXPECTED, attention_flops=share), 8192).flops_s for share in (1, 0.5)
    )
    attention = one.work.stages[0].prompt_attention_flops(8192) / H100.dense_flops["bf16"] / H100.matmul_share
    assert half - whole == pytest.approx(attention)


def test_answers_cut_off_end_more_rarely() -> None:
    assert 0 < share_ending_per_step(100, 256) < 1 / 100
    assert share_ending_per_step(256, 256) == 0


# -- pipeline stages: idle ones, the slowest one, prompts of other batches, uneven batches

OUTPUTS = 256


def of_stages(stages: int, *, name: str = "70b", version: str = "0.31.0", **options: Any) -> Roofline:
    options |= {"vllm_version": version, "async_scheduling": False}
    return roofline(name, "h200", tp=2, pp=stages, **options)


def test_a_single_request_passes_all_stages_whole_however_many_there_are() -> None:
    one, four = (of_stages(stages).decode(1, 8192) for stages in (1, 4))
    assert four.cache_s == pytest.approx(one.cache_s)
    assert four.weights_s == pytest.approx(one.weights_s, rel=0.01)
    assert four.bubble_s == 0


def test_fewer_requests_than_stages_take_as_long_as_one() -> None:
    staged = of_stages(4)
    assert staged.decode(2, 8192).pass_s == pytest.approx(staged.decode(1, 8192).pass_s)
    assert staged.decode(8, 8192).pass_s > staged.decode(4, 8192).pass_s


def test_the_slowest_stage_sets_the_pace_where_all_stages_are_busy() -> None:
    """The last of four stages of 8B has the head too: 1.05 GB beside 3.5 GB of layers."""
    staged = of_stages(4, name="8b")
    step = staged.decode(8, 1024)
    rest, last = staged.work.stages[1], staged.work.stages[-1]
    slower = (last.dense_bytes - rest.dense_bytes) / (staged.bandwidth * EXPECTED.bandwidth)
    assert step.bubble_s > 2 * slower
    assert step.total_s == pytest.approx(step.pass_s + step.bubble_s)
    assert step.causes["bubbles"] == step.bubble_s


@pytest.mark.parametrize(("stages", "requests"), [(2, 64), (2, 256), (4, 16), (4, 64), (4, 256)])
def test_answers_of_varying_lengths_come_as_fast_as_in_a_simulation_of_the_scheduler(stages, requests):
    staged = of_stages(stages)
    traffic = Traffic(input_tokens=1024, output_tokens=OUTPUTS, concurrency=requests)
    found = speed_column(staged, traffic, requests, DEVICE).output_tokens_per_s
    assert found == pytest.approx(simulated(staged, requests, 1024, vary=True), rel=0.1)


@pytest.mark.parametrize(("stages", "requests"), [(2, 64), (4, 64), (4, 256)])
def test_answers_of_one_length_in_a_burst_have_few_bubbles_as_in_the_simulation(stages: int, requests: int) -> None:
    staged = of_stages(stages)
    traffic = Traffic(input_tokens=1024, output_tokens=OUTPUTS, concurrency=40 * requests, arrivals="burst")
    found = speed_column(staged, traffic, requests, DEVICE).output_tokens_per_s
    seen = simulated(staged, requests, 1024, vary=False)
    assert found == pytest.approx(seen, rel=0.25)
    assert seen > 1.15 * simulated(staged, requests, 1024, vary=True)


def test_requests_whose_prompts_fill_one_step_stay_in_one_batch() -> None:
    """16 prompts of 128 tokens fill one step of 8,192 tokens, and four of 512. V0 divided the requests."""
    traffic = Traffic(input_tokens=128, output_tokens=OUTPUTS, concurrency=16, arrivals="burst")
    together, divided, before = (
        speed_column(one, traffic, 16, EXPECTED).tpot_s
        for one in (of_stages(4), of_stages(4, max_num_batched_tokens=512), of_stages(4, version="0.6.3"))
    )
    assert together > 1.02 * divided
    assert divided == pytest.approx(before, rel=0.02)


def simulated(staged: Roofline, requests: int, inputs: int, *, vary: bool) -> float:
    """Return the tokens per second of requests that are replaced when they end, by vLLM's rule: a step has all tokens
    that are due and as much of the waiting prompts as fits; no more steps are under way than stages."""
    lengths, stages = random.Random(1), staged.layout.pipeline_parallel_size
    seconds: dict[tuple[int, int], float] = {}

    def length() -> int:
        return 1 + int(lengths.expovariate(1 / OUTPUTS)) if vary else OUTPUTS

    def stage_s(decoding: int, prompts: int) -> float:
        key = decoding, prompts
        if key not in seconds:
            tokens, context = stages * (decoding + prompts), inputs + OUTPUTS / 2
            seconds[key] = staged.step(tokens, stages * decoding, context, DEVICE, inputs).total_s / stages
        return seconds[key]

    waiting = [[inputs, length()] for _ in range(requests)]
    due: list[list[int]] = []
    under_way: list[tuple[float, list[list[int]]]] = []
    free, now, tokens, begun = [0.0] * stages, 0.0, 0, (0.0, 0)
    for step in range(stages * 4000):
        if step == stages * 1000:
            begun = now, tokens
        while len(under_way) < stages and (due or waiting):
            batch, decoding, due = due, len(due), []
            left = staged.max_num_batched_tokens - decoding
            while waiting and left:
                read = min(left, waiting[0][0])
                left -= read
                waiting[0][0] -= read
                if waiting[0][0] == 0:
                    batch.append(waiting.pop(0))
            at = now
            for stage in range(stages):
                at = max(at, free[stage]) + stage_s(decoding, staged.max_num_batched_tokens - decoding - left)
                free[stage] = at
            under_way.append((at, batch))
        at, batch = under_way.pop(0)
        now = max(now, at)
        for request in batch:
            request[1] -= 1
            tokens += 1
            if request[1]:
                due.append(request)
            else:
                waiting.append([inputs, length()])
    return (tokens - begun[1]) / (now - begun[0])
