"""The layouts that come out of the planner: the committed scripts', those people ask about, and why not others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import ClusterSpec, ServePlan, Workload, accelerator, plan, resolve
from hpc_serve.plan.catalog import models
from hpc_serve.plan.choice.candidates import compare_sharing, replica_options
from hpc_serve.plan.choice.planner import NoLayoutError
from hpc_serve.plan.report.explain import explain
from tests.support.plan_numbers import NUMBERS
from tests.support.plan_numbers import planned as numbers_of
from tests.support.plans import layout as layout_with
from tests.support.plans import plan_inputs, planned, spec

SHORT: dict[str, Any] = {"max_model_len": 8192}


def layout_of(found: ServePlan) -> tuple[int, int, int, int]:
    one = found.layout
    return one.tensor_parallel_size, one.pipeline_parallel_size, one.num_nodes, one.gpus_per_node


def refused(name: str, gpu: str = "h100-80gb", **asked: Any) -> NoLayoutError:
    """The error of a plan for which there is no layout."""
    with pytest.raises(NoLayoutError) as caught:
        planned(name, gpu, **asked)
    return caught.value


def has(texts: Iterable[object], *words: str) -> bool:
    """Whether one of the texts has all these words."""
    return any(all(word in str(text) for word in words) for text in texts)


@pytest.mark.parametrize(
    ("alias", "weights", "full_context"), [("70b", 2, 3), ("405b", 11, 11), ("405b-first-release", 11, 12)]
)
def test_fewest_h100s_as_people_quote_them(alias: str, weights: int, full_context: int) -> None:
    """ "11 and 12" for 405B is of its first release, with 16 KV heads."""
    minimum = planned(alias).minimum_gpus
    assert (minimum.weights, minimum.full_context) == (weights, full_context)
    assert (minimum.usable or 0) >= full_context


@pytest.mark.parametrize("alias", ["405b", "405b-first-release"])
def test_405b_is_a_matter_of_two_nodes(alias: str) -> None:
    assert layout_of(planned(alias)) == (8, 2, 2, 8)
    error = refused(alias, nodes=1)
    assert "TP=8 PP=1 (1 node x 8): 10" in str(error)  # GiB per GPU before any cache
    assert "72.9 usable" in str(error)
    assert "--nodes 2 --gpus-per-node 8 (TP=8 PP=2)" in str(error)
    assert error.exit_code == 3


def test_405b_on_four_nodes_of_four_says_what_it_chose_between() -> None:
    found = planned("405b", nodes=4, size=4)
    assert layout_of(found) == (4, 4, 4, 4)
    across = next(c for c in found.candidates if c.layout.tensor_parallel_size == 16)
    assert across.verdict == "fits"
    assert across.memory
    assert across.memory.kv_cache_tokens < found.memory.kv_cache_tokens / 2  # KV heads held twice
    assert has(found.reasons, "TP=16 PP=1", "cross the network")
    assert has(found.reasons, "8 KV heads would be held 2 times")


def test_70b_is_a_matter_of_four() -> None:
    """On two there is room for the weights, and for some ten thousand tokens, not for one request of 131 thousand."""
    two = next(c for c in planned("70b").candidates if c.layout.tensor_parallel_size == 2)
    assert two.verdict == "too small"
    assert two.memory is not None
    assert 5_000 < two.memory.kv_cache_tokens < 20_000


def test_a_hybrid_is_told_no_more_sequences_than_it_has_blocks() -> None:
    """vLLM refuses the default of 1,024 on an H100 (vllm-project/recipes, pull request 551, sets 512)."""
    found = planned("Qwen/Qwen3.5-27B", quantization="fp8")
    assert layout_of(found) == (1, 1, 1, 1)
    assert found.vllm_args[found.vllm_args.index("--max-num-seqs") + 1] == "512"
    assert has(found.reasons, "more sequences than blocks")
    assert "--max-num-seqs" not in planned("Qwen/Qwen3.5-27B", quantization="fp8", enforce_eager=True).vllm_args
    assert "--max-num-seqs" not in planned("8b").vllm_args


@pytest.mark.parametrize(
    ("name", "asked", "layout"),
    [
        ("70b", SHORT, (2, 1, 1, 2)),
        ("70b", {"concurrency": 8}, (8, 1, 1, 8)),
        ("8b", {"concurrency": 4}, (2, 1, 1, 2)),
        ("70b", {"concurrency": 20}, (8, 2, 2, 8)),
        # what is asked for is kept
        ("70b", SHORT | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 2, 1, 4)),
        ("70b", SHORT | {"tensor_parallel_size": 8}, (8, 1, 1, 8)),
        ("70b", SHORT | {"pipeline_parallel_size": 4}, (1, 4, 1, 4)),
        ("70b", SHORT | {"nodes": 2}, (8, 2, 2, 8)),
        ("70b", SHORT | {"nodes": 2, "tensor_parallel_size": 4}, (4, 4, 2, 8)),
        ("70b", SHORT | {"nodes": 2, "tensor_parallel_size": 16}, (16, 1, 2, 8)),
        ("70b", SHORT | {"nodes": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (2, 2, 2, 2)),
        ("70b", SHORT | {"nodes": 3, "size": 4}, (4, 3, 3, 4)),
        # 28 heads: TP 8 is refused, so eight GPUs are TP=4 x PP=2
        (
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
            {"gpu": "t4", "size": 8, "concurrency": 30, "max_model_len": 32768},
            (4, 2, 1, 8),
        ),
    ],
)
def test_as_few_gpus_as_hold_what_is_asked_for(name, asked, layout):
    assert layout_of(planned(name, **asked)) == layout


@pytest.mark.parametrize(
    ("quantization", "cache", "chips"), [(None, "auto", 16), ("int8", "int8", 8), ("int4", "int8", 4)]
)
def test_70b_on_tpu_v5e(quantization: str | None, cache: str, chips: int) -> None:
    """Slices of the scaling book's chapter on serving Llama 3-70B: 4x4, 4x2, 2x2."""
    found = planned("70b", "v5e", quantization=quantization, kv_cache_dtype=cache, max_model_len=8192)
    assert found.layout.tensor_parallel_size == chips
    assert found.layout.pipeline_parallel_size == 1


def test_one_two_or_four_replicas_of_70b_on_eight_a100() -> None:
    """The on-prem guide of llama-recipes prefers four, which leaves almost no cache."""
    ways = replica_options(plan_inputs("70b", "a100-80gb"))
    assert [(way.replicas, way.layout.tensor_parallel_size) for way in ways] == [(1, 8), (2, 4), (4, 2)]
    totals = [way.total_tokens for way in ways]
    assert totals[0] > totals[1] > 5 * totals[2]
    assert has([compare_sharing(ways, 131072)], f"{totals[2]:,}", f"{totals[0]:,}", "may have at most")


def test_replicas_share_the_machines() -> None:
    for name, nodes, layout in (("70b", 1, (4, 1, 1, 4)), ("405b", 4, (8, 2, 2, 8))):
        found = planned(name, nodes=nodes, replicas=2)
        assert (layout_of(found), found.replicas) == (layout, 2)
    with pytest.raises(InvalidRequestError, match="3 replicas cannot share 1 x 8"):
        planned("8b", nodes=1, replicas=3)
    assert refused("70b", nodes=1, replicas=4)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tensor_parallel_size": 3}, r"attention heads \(64\) must be divisible by tensor parallel size \(3\)"),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 3, "nodes": 2}, "24 ranks, but 2 x 8 GPUs are 16"),
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 3, "nodes": 2}, "2 nodes cannot share evenly"),
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 96, "nodes": 12}, "96 stages cannot share 80 layers"),
        ({"tensor_parallel_size": 1000}, r"TP=1000 takes more than the 512 GPUs there are \(64 nodes x 8, the most"),
        ({"tensor_parallel_size": 16, "nodes": 1}, r"TP=16 takes more than the 8 GPUs there are \(1 node x 8\)"),
        ({"tensor_parallel_size": 12, "nodes": 2}, "TP=12 does not divide the 16 GPUs"),
        ({"pipeline_parallel_size": 3, "nodes": 1}, "PP=3 does not divide the 8 GPUs.*out --pipeline-parallel-size"),
        (
            {"name": "Qwen/Qwen3.5-27B", "nodes": 1, "size": 1, "quantization": "fp8", "max_num_seqs": 1024},
            r"max_num_seqs \(1024\) exceeds available Mamba cache blocks(.|\n)*--max-num-seqs 512",
        ),
        # what would make it fit
        ({"nodes": 1, "size": 2, "max_model_len": None}, r"--max-model-len \d+"),
        ({"name": "405b", "nodes": 1, "max_model_len": None}, "fp8 weights"),
        ({"gpu": "l4", "nodes": 1, "max_model_len": None}, "--nodes 2 --gpus-per-node 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers_and_what_would_help(asked: dict[str, Any], says: str) -> None:
    assert re.search(says, str(refused(**{"name": "70b", **SHORT, **asked})))


def test_requests_that_the_cache_cannot_hold_wait() -> None:
    found = planned("70b", nodes=1, concurrency=15)
    assert layout_of(found) == (8, 1, 1, 8)
    assert found.reasons[0].startswith(
        "The cache holds 10 of 15 requests of the longest context: the others wait, as vLLM queues them."
    )
    assert "--kv-cache-dtype fp8" in map(str, found.suggestions)
    assert "--concurrency 10 (requests of that length at once)" in map(str, found.suggestions)
    assert planned("70b", nodes=1, concurrency=10).suggestions == ()


def test_requests_of_known_length_take_what_they_need() -> None:
    """On two GPUs there is no room for one request of the longest context, on four for many short ones."""
    short = planned("70b", concurrency=100, request_tokens=1280)
    assert (layout_of(short), short.suggestions) == ((4, 1, 1, 4), ())
    waiting = planned("8b", "l4", nodes=1, size=1, max_model_len=4096, concurrency=100, request_tokens=1280)
    assert re.match(r"The cache holds \d+ of 100 requests of 1,280 tokens: the others wait", waiting.reasons[0])


def test_a_model_that_holds_no_request_is_refused_however_many_are_asked_for() -> None:
    text = str(refused("405b", nodes=1, concurrency=50))
    assert "with 1 request of 131,072 tokens" in text
    assert "50" not in text.split("It would")[0].replace("TP=8", "")


@pytest.mark.parametrize(
    ("asked", "headline", "sizes"),
    [
        ({"tensor_parallel_size": 3}, "Llama-3.3-70B-Instruct cannot be served so:", (4, 1, 1)),
        ({"pipeline_parallel_size": 88}, "cannot be served so:", (1, 8, 1)),
        ({"tensor_parallel_size": 128}, "cannot be served so:", (8, 1, 1)),
    ],
)
def test_sizes_that_cannot_be_are_answered_with_the_nearest_that_can(asked, headline, sizes):
    error = refused("70b", **asked)
    assert headline in str(error)
    tensor, pipeline, nodes = sizes
    remedy = f"--tensor-parallel-size {tensor} --pipeline-parallel-size {pipeline} --nodes {nodes}"
    assert [str(one) for one in error.suggestions] == [remedy]
    found = planned("70b", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, nodes=nodes)
    assert layout_of(found)[:3] == sizes


@pytest.mark.parametrize(
    ("name", "gpu", "asked", "words"),
    [
        (
            "8b",
            "v100",
            {"dtype": "bfloat16"},
            "bfloat16 on V100-SXM2-32GB: it needs compute capability 8, here is 7; use --dtype",
        ),
        ("8b", "t4", {"kv_cache_dtype": "fp8"}, "a cache in fp8 on T4: .*leave out --kv-cache-dtype"),
        ("r1", "a100", {"kv_cache_dtype": "fp8"}, "a cache in fp8 on A100.*leave out --kv-cache-dtype"),
        ("gpt-oss-20b", "a100", {"kv_cache_dtype": "fp8"}, "a cache in fp8 on A100"),
        ("gpt-oss-20b", "t4", {}, "mxfp4 weights on T4"),
        ("Qwen/Qwen3-32B-FP8", "a100", {"kv_cache_dtype": "fp8_e5m2"}, "a cache in fp8_e5m2 for a checkpoint in fp8"),
        ("Qwen/Qwen3-32B-FP8", "v100", {}, "fp8 weights on V100"),
        ("gemma-3-27b", "v100", {}, "float16 for Gemma3ForConditionalGeneration: use --dtype float32"),
        ("gemma-3-27b", "h100-80gb", {"dtype": "float16"}, "float16 for Gemma3.*use --dtype bfloat16"),
    ],
)
def test_types_without_kernels_are_refused(name: str, gpu: str, asked: dict[str, Any], words: str) -> None:
    assert re.search(f"vLLM refuses {words}", str(refused(name, gpu, **asked)))


def test_types_with_kernels_are_taken() -> None:
    assert planned("8b", "a100-64gb", dtype="bfloat16")
    assert planned("8b", "a100", kv_cache_dtype="fp8")
    assert planned("gemma-3-27b", "v100", dtype="float32")


def test_remedies_are_of_types_with_kernels() -> None:
    for name, gpu, nodes in (("70b", "v100", 1), ("8b", "t4", 1), ("deepseek-ai/DeepSeek-V2-Chat", "a100-40gb", 1)):
        assert not has(refused(name, gpu, nodes=nodes, size=1).suggestions, "--kv-cache-dtype")
    assert not has(refused("70b", "v100", nodes=1, size=4).suggestions, "--quantization fp8")


def test_a_format_that_vllm_will_drop_is_allowed() -> None:
    allow = "--allow-deprecated-quantization"
    assert allow in planned("405b-fp8").vllm_args
    assert allow not in (*planned("405b-fp8", vllm_version="0.10").vllm_args, *planned("r1").vllm_args)


def test_a_checkpoint_in_another_format_is_not_quantised_by_vllm() -> None:
    found = planned("gpt-oss-120b", quantization="fp8")
    assert "--quantization" not in found.vllm_args
    assert has(found.reasons, "Sized as if openai/gpt-oss-120b were quantised with fp8")
    assert "--quantization mxfp8" in " ".join(planned("8b", quantization="mxfp8").vllm_args)


def test_a_number_of_chips_that_no_slice_has_is_said() -> None:
    assert "7 nodes of 8 v5e: no slice has so many chips." in str(refused("8b", "v5e", nodes=7))


@pytest.mark.parametrize(("name", "gpu"), [("405b", "v5e"), ("405b", "h100-80gb"), ("70b", "l4"), ("8b", "t4")])
def test_no_layout_is_told_twice(name: str, gpu: str) -> None:
    found = planned(name, gpu)
    layouts = [candidate.layout for candidate in found.candidates]
    assert len(layouts) == len(set(layouts))
    assert len(found.reasons) == len(set(found.reasons))


def test_the_context_proposed_fits_and_the_next_does_not() -> None:
    options = [one.options for one in refused("70b", nodes=1, size=2).suggestions]
    length = int(next(one["--max-model-len"] for one in options if list(one) == ["--max-model-len"]))
    assert planned("70b", nodes=1, size=2, max_model_len=length)
    assert refused("70b", nodes=1, size=2, max_model_len=length + 1024)


def test_flags_say_what_was_asked_for() -> None:
    asked: dict[str, Any] = {"gpu_memory_utilization": 0.8, "max_num_seqs": 64, "enforce_eager": True}
    found = planned("70b", quantization="fp8", kv_cache_dtype="fp8", max_model_len=8192, **asked)
    assert " ".join(found.vllm_args[6:]) == (  # fp8_per_tensor: vLLM 0.32's name for fp8 made while loading
        "--gpu-memory-utilization 0.8 --max-num-seqs 64 --kv-cache-dtype fp8 --quantization fp8_per_tensor "
        "--enforce-eager"
    )
    assert has(found.reasons, "quantises the 16-bit checkpoint to fp8")


def test_a_method_that_needs_another_checkpoint_is_said_and_not_passed_on() -> None:
    found = planned("70b", quantization="awq", max_model_len=8192)
    assert "--quantization" not in found.vllm_args
    assert has(found.reasons, "as if", "serve a checkpoint that is")
    assert has(planned("70b", quantization="bitsandbytes").reasons, "no longer has bitsandbytes")


def test_a_gpu_without_bfloat16_refuses_it_by_name_only() -> None:
    t4, workload = ClusterSpec(accelerator=accelerator("t4")), Workload(max_model_len=2048)
    assert plan(spec("meta-llama/Llama-3.2-3B"), t4, workload=workload).layout.num_nodes == 1
    with pytest.raises(DoesNotFitError, match="--dtype float16"):
        plan(spec("meta-llama/Llama-3.2-3B", dtype="bfloat16"), t4, workload=workload)


def test_explanation_adds_up() -> None:
    found = planned("405b")
    inputs = plan_inputs("405b", length=131072)
    lines = explain(inputs, layout_with(8, 2, nodes=2), found.memory, found.minimum_gpus, note=resolve("405b").note)
    text = "\n".join(lines)
    for expected in ("405,853,388,800", "811.7 / 80 = 10.15 -> 11", "61.52 GiB", "63.00 GiB", "16 KV heads", "123.05"):
        assert expected in text
    budget = [re.match(r"  ([ =-]) +([\d.]+) GiB  ", line) for line in lines]
    signed = [(match[1], float(match[2])) for match in budget if match]
    assert [sign for sign, _ in signed] == [" ", "-", "-", "-", "-", "-", "="]
    assert signed[0][1] - sum(size for sign, size in signed if sign == "-") == pytest.approx(signed[-1][1], abs=0.04)


def test_small_replicas_win_where_they_leave_no_less_cache() -> None:
    ways = replica_options(plan_inputs("Qwen/Qwen2.5-0.5B", length=2048))
    assert ways[-1].typical_requests >= ways[0].typical_requests
    assert "hold no less" in (compare_sharing(ways, 2048) or "")


def test_the_plan_of_every_model_is_as_it_was(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no weights that lie on this machine
    assert {name: numbers_of(name) for name in sorted(models())} == json.loads(NUMBERS.read_text())
