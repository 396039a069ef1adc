"""Layouts chosen by speed: what is considered, what is said of it, and that the plan keeps the target."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan import EngineConfig, Workload, model_from_config, resolve
from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.choice.candidates import PlanInputs
from hpc_serve.plan.hardware.cluster import cluster_named
from hpc_serve.plan.speed.classes import PIPELINE_STAGES
from hpc_serve.plan.speed.target import SpeedTarget, choose_deployment
from hpc_serve.plan.speed.traffic import Traffic


def inputs(name: str, gpu: str = "h100-80gb", num_nodes: int | None = None) -> PlanInputs:
    cluster = replace(cluster_named(gpu, num_nodes=num_nodes), is_whole=False)
    model = model_from_config(resolve(name).config, name=name)
    workload = Workload(max_model_len=8192)
    return PlanInputs(model=model, cluster=cluster, engine=EngineConfig(), workload=workload, max_model_len=8192)


def test_who_comes_to_a_busy_engine_waits_for_a_step_at_least() -> None:
    option, _ = choose_deployment(inputs("8b"), Traffic(), SpeedTarget())
    speed = option.estimate.expected
    assert option.estimate.batch > 100
    assert speed.ttft_s > speed.tpot_s


def test_engines_over_a_share_of_the_nodes_are_considered() -> None:
    _, reasons = choose_deployment(inputs("405b", num_nodes=4), Traffic(), SpeedTarget())
    assert any("2 replicas of TP=8 PP=2" in reason for reason in reasons)
    assert any("one TP=8 PP=4" in reason for reason in reasons)


def test_more_stages_than_nodes_are_left_out_with_how_far_published_runs_of_stages_were_off() -> None:
    option, reasons = choose_deployment(inputs("70b", "v5e:4x4"), Traffic(), SpeedTarget())
    assert (option.layout.tensor_parallel_size, option.layout.pipeline_parallel_size) == (16, 1)
    low, high = speed_accuracy()["classes"][PIPELINE_STAGES]["measured_by_printed"]
    assert any("left out" in reason and f"had {low:g} to {high:g} times" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("target", "helps"), [(SpeedTarget(ttft_s=0.001), "shorter prompts"), (SpeedTarget(tpot_s=0.001), "faster memory")]
)
def test_what_would_help_is_of_what_was_missed(target: SpeedTarget, helps: str) -> None:
    with pytest.raises(DoesNotFitError, match=helps):
        choose_deployment(inputs("70b"), Traffic(), target)


def test_a_target_is_kept_by_the_command_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "70b", "--target", "tpot=50ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    args = found["vllm_args"]
    most = int(args[args.index("--max-num-seqs") + 1])
    last = found["performance"]["by_concurrency"][-1]
    assert last["concurrency"] == most
    assert 0.045 < last["expected"]["tpot_s"] <= 0.050


def test_the_plan_says_where_the_knee_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "8b", "--explain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"knee is at about (\d+) in flight: twice as many give (\d+) % more tokens/s", said)
    assert found
    assert 4 <= int(found[1]) <= 256
    assert int(found[2]) < 50


def test_where_the_cache_holds_few_there_is_no_knee(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "8b", "--max-num-seqs", "2", "--explain"]) == 0
    assert "No knee: tokens/s still grow well at the 2 requests" in " ".join(capsys.readouterr().out.split())
