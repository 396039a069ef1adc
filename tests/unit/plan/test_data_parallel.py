"""Data-parallel ranks that share experts, and ranks that divide a request's cache: memory and layouts, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan import ClusterSpec, EngineConfig, ServePlan, accelerator
from hpc_serve.plan.choice.layout import layouts_on
from hpc_serve.plan.choice.planner import NoLayoutError
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.memory.loaded import pipeline_stages
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, requests_held, speed_column
from hpc_serve.plan.speed.step import EXPECTED, IDEAL
from hpc_serve.plan.speed.throughput import Traffic
from tests.support import plans
from tests.support.plans import estimate, replica, roofline, spec, speed

H200 = accelerator("h200")
R1, QWEN = "r1", "Qwen/Qwen3-30B-A3B"


def weights(name: str, tp: int, dp: int, *, expert_parallel: bool = True) -> int:
    return pipeline_stages(spec(name), tp, 1, dp, expert_parallel=expert_parallel)[0].weight_bytes


def memory(name: str, tp: int = 1, dp: int = 1, **options: Any) -> MemoryEstimate:
    return estimate(name, H200, tp=tp, dp=dp, **{"enable_expert_parallel": dp > 1, **options})


def planned(name: str, nodes: int, gpu: str = "h200", *, max_model_len: int = 8192, **options: Any) -> ServePlan:
    return plans.planned(name, gpu, nodes=nodes, max_model_len=max_model_len, **options)


def test_shared_experts_are_whole_on_each_rank_of_a_tensor_parallel_group_with_data_parallelism() -> None:
    """vLLM gives each rank of such a group other tokens: `use_sequence_parallel_moe`."""
    scales = 3 * (2048 // 128) * (7168 // 128) * 4
    shared = 58 * (3 * 7168 * 2048 + scales)  # fp8, with a scale of 32 bit for each block of 128 x 128
    experts = 58 * 256 * (3 * 7168 * 2048 + scales)
    assert weights(R1, 2, 8) - weights(R1, 2, 1) == experts // 16 - experts // 2 + shared - shared // 2


def test_the_cache_and_the_sequences_are_those_of_one_data_parallel_rank() -> None:
    alone, eight = memory(R1, tp=8), memory(R1, dp=8)
    assert eight.kv_bytes_per_token == alone.kv_bytes_per_token == 61 * 576 * 2  # a latent is not divided by TP
    assert eight.max_num_seqs == alone.max_num_seqs
    assert memory(QWEN, dp=4).kv_bytes_per_token == 4 * memory(QWEN, tp=4).kv_bytes_per_token


def test_the_experts_of_a_rank_see_the_tokens_of_all_data_parallel_ranks() -> None:
    """The two workspaces of the experts are gathered tokens x 8 chosen experts x 7,168, in 16 bit."""
    tokens = 2048
    for ranks in (2, 8):
        more = memory(R1, dp=ranks, max_num_batched_tokens=tokens).activation_bytes
        less = memory(R1, dp=ranks, max_num_batched_tokens=tokens // 2).activation_bytes
        gathered = ranks * (tokens // 2) * 8 * 2 * 7168 * 2
        assert gathered <= more - less < gathered * 1.2


def test_decode_context_ranks_divide_the_tokens_of_a_request() -> None:
    plain, divided = memory(R1, tp=8), memory(R1, tp=8, decode_context_parallel_size=8)
    assert plain.bytes_per_block == divided.bytes_per_block
    assert plain.blocks_per_request == 8192 // 64
    assert divided.blocks_per_request == 8192 // 64 // 8
    assert divided.kv_cache_tokens == pytest.approx(8 * plain.kv_cache_tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "tp", "dcp", "says"),
    [
        (R1, 8, 3, "--decode-context-parallel-size 3 is more, or does not divide TP"),
        (QWEN, 4, 2, "TP=4 holds each part of the cache 1 times"),
        (QWEN, 32, 3, "--decode-context-parallel-size 3 is more, or does not divide TP"),
        ("gpt-oss-120b", 8, 2, "has layers with windows"),
    ],
)
def test_decode_context_ranks_that_vllm_refuses(name: str, tp: int, dcp: int, says: str) -> None:
    with pytest.raises(DoesNotFitError, match=says):
        memory(name, tp=tp, decode_context_parallel_size=dcp)


def test_a_layout_asked_for_takes_tp_x_pp_x_dp_gpus() -> None:
    chosen = planned(R1, 2, data_parallel_size=8, enable_expert_parallel=True)
    assert str(chosen.layout) == "DP=8 TP=2 PP=1 (2 nodes x 8)"
    assert chosen.vllm_args[:8] == (
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"),
        *("--max-model-len", "8192", "--data-parallel-size", "8"),
    )
    with pytest.raises(NoLayoutError, match="DP=16 x TP=2 x PP=1 is 32 ranks, but 2 x 8 GPUs are 16"):
        planned(R1, 2, data_parallel_size=16, tensor_parallel_size=2, pipeline_parallel_size=1)
    with pytest.raises(NoLayoutError, match="DP=3 does not divide the 16 GPUs there are"):
        planned(R1, 2, data_parallel_size=3)


def test_a_layout_that_cuts_a_data_parallel_rank_is_no_candidate() -> None:
    with pytest.raises(NoLayoutError, match="3 nodes x 8 cut a data-parallel rank of 12"):
        planned(R1, 3, data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=3)
    engine = EngineConfig(data_parallel_size=2)
    assert not list(layouts_on(3, ClusterSpec(accelerator=H200, num_nodes=3), engine))
    spanned = layouts_on(4, ClusterSpec(accelerator=H200, num_nodes=4), engine)
    assert "DP=2 TP=8 PP=2" in {one.sizes() for one in spanned}


def test_requests_at_once_are_divided_among_the_data_parallel_ranks() -> None:
    held, waits = (
        planned(R1, 2, max_model_len=163_840, data_parallel_size=16, concurrency=count) for count in (48, 80)
    )
    assert not any("the others wait" in reason for reason in held.reasons)
    assert any("The cache holds 48 of 80 requests" in reason for reason in waits.reasons)


def test_a_plan_for_experts_shows_data_parallel_ranks_beside_its_choice() -> None:
    beside = [one for one in planned(R1, 1).candidates if one.layout.data_parallel_size > 1]
    assert [str(one.layout) for one in beside] == ["DP=8 TP=1 PP=1 (1 node x 8)"]
    assert not any(one.layout.data_parallel_size > 1 for one in planned("70b", 1).candidates)


def test_fewer_tokens_of_a_step_are_proposed_where_the_gathered_tokens_do_not_fit() -> None:
    asked: dict[str, Any] = {"data_parallel_size": 16, "enable_expert_parallel": True}
    with pytest.raises(NoLayoutError) as refused:
        planned(R1, 2, "h100-80gb", **asked)
    options = [one.options for one in refused.value.suggestions if "--max-num-batched-tokens" in one.options]
    assert options
    tokens = int(options[0]["--max-num-batched-tokens"])
    assert planned(R1, 2, "h100-80gb", max_num_batched_tokens=tokens, **asked).layout.data_parallel_size == 16


def speeds(dp: int, nodes: int = 1, tp: int = 1) -> ReplicaSpeeds:
    return replica(QWEN, H200, tp=tp, dp=dp, nodes=nodes, enable_expert_parallel=dp > 1)


def test_a_data_parallel_rank_computes_as_much_a_token_and_holds_its_share_of_the_experts() -> None:
    alone, four = (speeds(ranks).roofline.work.stages[0] for ranks in (1, 4))
    assert four.expert_bytes * 4 == alone.expert_bytes
    for name in ("dense_bytes", "dense_flops", "expert_flops"):
        assert getattr(four, name) == getattr(alone, name)


def test_the_tokens_of_all_data_parallel_ranks_go_to_each_for_its_experts_and_back() -> None:
    """48 layers, hidden size 2,048 in 16 bit; 8 tokens a rank."""
    size = 2 * 48 * 8 * 2048 * 2
    alone, within, across = (
        speeds(*sizes).roofline.decode(8, 1, IDEAL).communication_s for sizes in ((1, 1), (8, 1), (16, 2))
    )
    assert within == pytest.approx(7 * size / H200.link_bytes_per_s)
    out = 8 * size / (8 * H200.network_bytes_per_s)
    assert across == pytest.approx(15 * size / H200.link_bytes_per_s + out)
    assert alone == 0


def test_ranks_that_step_together_serve_a_share_of_the_requests_each() -> None:
    four = speeds(4)
    one, full, more = map(four.at, (1, 64, 65))
    assert full.expected.step == four.roofline.decode(16, Traffic().mean_context)
    assert more.expected.step == four.roofline.decode(17, Traffic().mean_context)  # the fullest rank decides
    assert (one.batch, full.batch) == (1, 64)
    assert one.expected.output_tokens_per_s < full.expected.output_tokens_per_s / 20
    assert full.capacity == 4 * requests_held(four.roofline, Traffic(), four.memory)


@pytest.mark.parametrize(
    ("target", "has_data_parallelism", "why"),
    [
        ("throughput", True, "Data-parallel ranks: each keeps the cache of its own requests alone"),
        ("tpot=25ms", False, "No data-parallel ranks: each reads all weights but the experts in every step"),
    ],
)
def test_data_parallelism_is_for_many_requests_and_tensor_parallelism_for_few(
    plan_json, target, has_data_parallelism, why
):
    told = plan_json("r1", "--gpu", "h200", "--nodes", "2", "--target", target)
    assert (told["data_parallel_size"] > 1) == has_data_parallelism
    assert ("--enable-expert-parallel" in told["vllm_args"]) == has_data_parallelism
    assert any("DP=" in reason and "tokens/s" in reason for reason in told["reasons"])
    assert any(reason.startswith(why) and "DP=" in reason for reason in told["reasons"])


def test_data_parallelism_of_a_dense_model_is_replicas(told) -> None:
    said = told("70b", "--gpu", "h200", "--nodes", "1", "--target", "throughput")
    assert "Data parallelism is replicas: meta-llama/Llama-3.3-70B-Instruct has no experts" in said


def test_ranks_wait_where_another_one_reads_a_prompt() -> None:
    """Of 16 prompts in a round of 256 steps a rank reads two, and nearly all 16 are in different steps."""
    roofline = speeds(8).roofline
    context, asked = 4096 + 128, (4096 + 2, 2, 4096 + 128, EXPECTED, 4096)
    alone, together = roofline.step(*asked, 1 / 8).total_s, roofline.step(*asked).total_s
    without = roofline.decode(2, context).total_s
    assert without < alone < together
    traffic = Traffic(input_tokens=4096, output_tokens=256, concurrency=16)
    waited = speed_column(roofline, traffic, 16, EXPECTED).tpot_s - without
    assert 10 * (alone - without) / 256 < waited < 16 * (together - without) / 256


@pytest.mark.parametrize(("in_flight", "faster"), [(64, "TP"), (128, "TP"), (1024, "DP")])
def test_tensor_parallelism_is_faster_up_to_some_requests_in_flight(in_flight: int, faster: str) -> None:
    """R1 on 8 MI300X, prompts of 8,192: TP up to 256 requests in flight, DP from 512 on (rocm-blogs, vllm-moe-guide of
    2025-11-24). At 512 TP is printed as 2 % faster. No row of it is scored."""
    options: dict[str, Any] = {"vllm_version": "0.11.1", "enable_expert_parallel": True, "length": 32768}
    rates = {}
    for name, sizes in (("TP", {"tp": 8}), ("DP", {"dp": 8})):
        found = replica(R1, "mi300x", **sizes, **options)
        asked = speed(found, input_tokens=8192, output_tokens=1024, concurrency=in_flight)
        rates[name] = asked.expected.requests_per_s
    assert max(rates, key=lambda name: rates[name]) == faster


def test_a_backend_that_sends_tokens_to_their_experts_alone_sends_less() -> None:
    def sent(backend: str, *, experts: bool) -> float:
        found = roofline(QWEN, H200, dp=32, nodes=4, enable_expert_parallel=experts, all2all_backend=backend)
        return found.decode(128, 1000).communication_s

    assert sent("deepep_low_latency", experts=True) < sent("allgather_reducescatter", experts=True)
    assert sent("deepep_low_latency", experts=False) == sent("allgather_reducescatter", experts=False)


def test_ranks_of_context_parallelism_read_parts_of_the_cache() -> None:
    whole, parts = (
        roofline(R1, H200, tp=8, decode_context_parallel_size=ranks).decode(1, 100_000, IDEAL).cache_s
        for ranks in (1, 8)
    )
    assert parts < whole


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2), (8, 1), (1, 8), (2, 8)])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_vllm_itself_divides_the_experts_so(monkeypatch, tp, dp, expert_parallel):
    pytest.importorskip("vllm", reason="its own arithmetic is called")
    from vllm.config import ParallelConfig
    from vllm.model_executor.layers.fused_moe import config as fused_moe

    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(fused_moe, "get_dp_group", lambda: group)
    monkeypatch.setattr(fused_moe, "get_tensor_model_parallel_rank", lambda: 0)
    asked = ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp",
    )
    divided = fused_moe.FusedMoEParallelConfig.make(tp, 1, dp, 1, asked)
    expert = 3 * 2048 * 768 * 2
    local = 128 // divided.ep_size * (expert // divided.tp_size)
    alone = weights(QWEN, tp, 1, expert_parallel=False) - 48 * 128 * (expert // tp)
    assert weights(QWEN, tp, dp, expert_parallel=expert_parallel) == alone + 48 * local
    assert asked.use_sequence_parallel_moe == (expert_parallel and tp > 1 and dp > 1)
