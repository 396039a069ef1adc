"""Pipeline stages: what idle stages, the slowest stage, prompts of other batches and uneven batches cost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hpc_serve.plan.speed.estimate import speed_column
from hpc_serve.plan.speed.step import EXPECTED, Roofline
from hpc_serve.plan.speed.throughput import Traffic
from tests.support import plans

OUTPUTS = 256
DEVICE = replace(EXPECTED, sequence_s=0)


def roofline(stages: int, *, name: str = "70b", version: str = "0.31.0", **options: Any) -> Roofline:
    options |= {"vllm_version": version, "async_scheduling": False}
    return plans.roofline(name, "h200", tp=2, pp=stages, **options)


def test_a_single_request_passes_all_stages_whole_however_many_there_are() -> None:
    one, four = (roofline(stages).decode(1, 8192) for stages in (1, 4))
    assert four.cache_s == pytest.approx(one.cache_s)
    assert four.weights_s == pytest.approx(one.weights_s, rel=0.01)
    assert four.bubble_s == 0


def test_fewer_requests_than_stages_take_as_long_as_one() -> None:
    staged = roofline(4)
    assert staged.decode(2, 8192).pass_s == pytest.approx(staged.decode(1, 8192).pass_s)
    assert staged.decode(8, 8192).pass_s > staged.decode(4, 8192).pass_s


def test_the_slowest_stage_sets_the_pace_where_all_stages_are_busy() -> None:
    """The last of four stages of 8B has the head too: 1.05 GB beside 3.5 GB of layers."""
    staged = roofline(4, name="8b")
    step = staged.decode(8, 1024)
    rest, last = staged.work.stages[1], staged.work.stages[-1]
    slower = (last.dense_bytes - rest.dense_bytes) / (staged.bandwidth * EXPECTED.bandwidth)
    assert step.bubble_s > 2 * slower
    assert step.total_s == pytest.approx(step.pass_s + step.bubble_s)
    assert step.causes["bubbles"] == step.bubble_s


@pytest.mark.parametrize(("stages", "requests"), [(2, 64), (2, 256), (4, 16), (4, 64), (4, 256)])
def test_answers_of_varying_lengths_come_as_fast_as_in_a_simulation_of_the_scheduler(
    stages: int, requests: int
) -> None:
    staged = roofline(stages)
    traffic = Traffic(input_tokens=1024, output_tokens=OUTPUTS, concurrency=requests)
    found = speed_column(staged, traffic, requests, DEVICE).output_tokens_per_s
    assert found == pytest.approx(simulated(staged, requests, 1024, vary=True), rel=0.1)


@pytest.mark.parametrize(("stages", "requests"), [(2, 64), (4, 64), (4, 256)])
def test_answers_of_one_length_in_a_burst_have_few_bubbles_as_in_the_simulation(stages: int, requests: int) -> None:
    staged = roofline(stages)
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
        for one in (roofline(4), roofline(4, max_num_batched_tokens=512), roofline(4, version="0.6.3"))
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
