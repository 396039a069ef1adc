"""What a step costs beside operations and bytes: starts of kernels, work on the host, attention; how answers end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_serve.plan import EngineConfig, ModelSpec, accelerator, model_from_config, resolve
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.speed.burst import share_ending_per_step
from hpc_serve.plan.speed.step import ASYNC_KERNELS, EXPECTED, Roofline
from hpc_serve.plan.speed.work import EXPERT_KERNELS, LATENT_KERNELS, LAYER_KERNELS

H100 = accelerator("h100-80gb")


def spec(name: str) -> ModelSpec:
    return model_from_config(resolve(name).config, name=name)


def roofline(name: str, stages: int = 1, *, version: str = "0.12.0") -> Roofline:
    engine = EngineConfig(vllm_version=version)
    layout = Layout(tensor_parallel_size=8, pipeline_parallel_size=stages, num_nodes=stages)
    return Roofline(spec(name), H100, engine, layout)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("70b", 80 * LAYER_KERNELS),
        ("qwen3-235b", 94 * (LAYER_KERNELS + EXPERT_KERNELS)),
        ("deepseek-r1", 61 * (LAYER_KERNELS + LATENT_KERNELS) + 58 * EXPERT_KERNELS),
    ],
)
def test_kernels_are_counted_by_the_kind_of_layer(name: str, kernels: int) -> None:
    for stages in (1, 2):
        assert sum(stage.kernels for stage in roofline(name, stages).work.stages) == kernels


def test_kernels_take_their_time_whatever_the_batch() -> None:
    only = replace(EXPECTED, sequence_s=0)
    for batch in (1, 256):
        assert roofline("70b").decode(batch, 1024, only).engine_s == pytest.approx(800 * EXPECTED.kernel_s)


def test_work_on_the_host_hides_behind_the_device_where_scheduling_is_asynchronous() -> None:
    before, since = roofline("8b", version="0.12.0"), roofline("8b", version="0.14.0")
    kernels = 32 * LAYER_KERNELS * EXPECTED.kernel_s
    assert before.decode(64, 1024).engine_s == pytest.approx(kernels + 64 * EXPECTED.sequence_s)
    assert since.decode(64, 1024).engine_s == pytest.approx(kernels * ASYNC_KERNELS)
    slow = replace(EXPECTED, sequence_s=1e-3)
    assert since.decode(64, 1024, slow).total_s == pytest.approx(64 * 1e-3)


def test_scheduling_is_asynchronous_by_default_since_014_and_over_stages_since_032() -> None:
    found = {
        (version, stages): roofline("70b", stages, version=version).async_scheduling
        for version in ("0.13.0", "0.14.0", "0.32.0")
        for stages in (1, 2)
    }
    assert {key for key, on in found.items() if on} == {("0.14.0", 1), ("0.32.0", 1), ("0.32.0", 2)}


def test_attention_has_a_share_of_the_peak_of_its_own() -> None:
    one = roofline("8b")
    at_all = one.step(8192, 0, 8192, replace(EXPECTED, attention_flops=1), 8192).flops_s
    at_half = one.step(8192, 0, 8192, replace(EXPECTED, attention_flops=0.5), 8192).flops_s
    attention = one.work.stages[0].prompt_attention_flops(8192) / H100.dense_flops["bf16"] / H100.matmul_share
    assert at_half - at_all == pytest.approx(attention)


def test_answers_cut_off_end_more_rarely() -> None:
    assert share_ending_per_step(100, None) == 1 / 100
    assert 0 < share_ending_per_step(100, 256) < 1 / 100
    assert share_ending_per_step(256, 256) == 0
