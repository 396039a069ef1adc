"""Layouts chosen by speed: what is considered, what is said of it, and that the plan keeps the target."""

from __future__ import annotations

import re

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.speed.estimate import PIPELINE_STAGES
from hpc_serve.plan.speed.target import Deployment, SpeedTarget, choose_deployment, parse_speed_target
from hpc_serve.plan.speed.throughput import Traffic
from tests.support.plans import plan_inputs, replica


def chosen(inputs: PlanInputs, **target: float) -> tuple[Deployment, list[str]]:
    return choose_deployment(inputs, Traffic(), SpeedTarget(**target))


@pytest.mark.parametrize("text", ["tpot=50", "fast", "tpot=0ms", "tpot=-1ms", "", "tpot=50ms;ttft=1s"])
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="write throughput"):
        parse_speed_target(text)


def test_targets() -> None:
    assert parse_speed_target("throughput") == SpeedTarget()
    assert parse_speed_target("tpot=50ms, ttft=1.5s") == SpeedTarget(tpot_s=0.05, ttft_s=1.5)


def test_small_replicas_win_on_throughput_and_a_wide_one_on_latency() -> None:
    many, reasons = chosen(plan_inputs("8b"))
    assert (many.replicas, many.layout.tensor_parallel_size) == (8, 1)
    assert any(reason.startswith("Not one TP=8") for reason in reasons)
    fast, _ = chosen(plan_inputs("8b"), tpot_s=0.0055)
    assert fast.layout.tensor_parallel_size > 1
    assert fast.estimate.expected.tpot_s <= 0.0055


def test_the_batch_is_as_large_as_the_target_allows() -> None:
    target, (option, _) = SpeedTarget(tpot_s=0.030), chosen(plan_inputs("70b"), tpot_s=0.030)
    more = replica("70b", tp=option.layout.tensor_parallel_size).at(option.estimate.traffic.concurrency + 1)
    assert target.is_met(option.estimate)
    assert not target.is_met(more)


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("405b-fp8", {"tpot_s": 0.001}, "nearest is .* ms between tokens"),
        ("70b", {"ttft_s": 0.001}, "shorter prompts"),
        ("70b", {"tpot_s": 0.001}, "faster memory"),
    ],
)
def test_what_cannot_be_reached_says_how_near_it_is_and_what_would_help(name, target, says):
    with pytest.raises(DoesNotFitError, match=says):
        chosen(plan_inputs(name), **target)


@pytest.mark.parametrize(
    "name", ["8b", "70b", "405b", "deepseek-r1", "gpt-oss-20b", "gemma-3-27b", "Qwen/Qwen3-Next-80B-A3B-Instruct"]
)
@pytest.mark.parametrize("gpu", ["h100", "a100", "mi300x", "v6e", "l40s"])
def test_a_target_is_met_by_what_is_chosen_or_refused(name: str, gpu: str) -> None:
    try:
        option, reasons = chosen(plan_inputs(name, gpu, length=4096), tpot_s=0.1)
    except DoesNotFitError:
        return
    assert SpeedTarget(tpot_s=0.1).is_met(option.estimate)
    assert option.estimate.ideal.tpot_s <= option.estimate.expected.tpot_s
    assert reasons[0].startswith("For throughput within a tpot of 100 ms: ")


@pytest.mark.parametrize(("name", "gpu", "says"), [("70b", "v5e", "C ÷ W_ici"), ("70b", "h100", "all-reduces")])
def test_the_width_beyond_which_links_bind_is_a_reason(name: str, gpu: str, says: str) -> None:
    _, reasons = chosen(plan_inputs(name, gpu))
    assert any(says in reason for reason in reasons)


def test_who_comes_to_a_busy_engine_waits_for_a_step_at_least() -> None:
    option, _ = chosen(plan_inputs("8b"))
    speed = option.estimate.expected
    assert option.estimate.batch > 100
    assert speed.ttft_s > speed.tpot_s


def test_engines_over_a_share_of_the_nodes_are_considered() -> None:
    _, reasons = chosen(plan_inputs("405b", nodes=4))
    assert any("2 replicas of TP=8 PP=2" in reason for reason in reasons)
    assert any("one TP=8 PP=4" in reason for reason in reasons)


def test_more_stages_than_nodes_are_left_out_with_how_far_published_runs_of_stages_were_off() -> None:
    option, reasons = chosen(plan_inputs("70b", "v5e:4x4"))
    assert (option.layout.tensor_parallel_size, option.layout.pipeline_parallel_size) == (16, 1)
    low, high = speed_accuracy()["classes"][PIPELINE_STAGES]["measured_by_printed"]
    assert any("left out" in reason and f"had {low:g} to {high:g} times" in reason for reason in reasons)


def test_a_target_out_of_reach_is_no_plan(plan_json, ran) -> None:
    words = ("405b", "--target", "tpot=1ms")
    assert "the nearest is" in ran(["plan", *words], 3).err
    assert plan_json(*words, code=3)["fits"] is False


def test_a_target_is_kept_by_the_command_that_is_printed(plan_json) -> None:
    found = plan_json("70b", "--target", "tpot=50ms")
    last, args = found["performance"]["by_concurrency"][-1], found["vllm_args"]
    assert last["concurrency"] == int(args[args.index("--max-num-seqs") + 1])
    assert 0.045 < last["expected"]["tpot_s"] <= 0.050


def test_the_plan_says_where_the_knee_is(told) -> None:
    found = re.search(
        r"knee is at about (\d+) in flight: twice as many give (\d+) % more tokens/s", told("8b", "--explain")
    )
    assert found
    assert 4 <= int(found[1]) <= 256
    assert int(found[2]) < 50


def test_where_the_cache_holds_few_there_is_no_knee(told) -> None:
    said = told("8b", "--max-num-seqs", "2", "--explain")
    assert "No knee: tokens/s still grow well at the 2 requests" in said
