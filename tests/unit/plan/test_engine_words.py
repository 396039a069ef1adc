"""Each option of `vllm serve` that may change memory or speed changes a plan, is refused, or is named as not counted.

vllm/data/classes.json says which options may be used, and vllm/data/uncounted.json which of those that the plan does
not read may matter. Each option is tried by itself, in the words of a command line, on a model where it counts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_serve.errors import HpcServeError, InvalidRequestError
from hpc_serve.plan import model_from_config, resolve
from hpc_serve.plan.choice.layout import read_fields
from hpc_serve.plan.engine import EngineConfig, Workload
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.plan.make import FoundParts, PlanRequest, make_plan
from hpc_serve.plan.model.config import with_overrides
from hpc_serve.vllm.command import check_arguments, classes
from hpc_serve.vllm.options import load_data

PASSED_OVER = load_data("uncounted.json")
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
LORA = ("--enable-lora",)
EXPERTS = ("--enable-expert-parallel", "--tensor-parallel-size", "4")
RANKS = ("--enable-expert-parallel", "--data-parallel-size", "4", "--tensor-parallel-size", "1")
GRAPHS = ['{"cudagraph_mode": "NONE"}', '{"cudagraph_mode": "PIECEWISE"}', '{"max_cudagraph_capture_size": 8}']
COUNTED: dict[str, tuple[str, list[str], tuple[str, ...]]] = {
    # option: model, values of which each gives another plan, what else must be given
    "--tensor-parallel-size": ("8b", ["2", "4", "8"], ()),
    "--pipeline-parallel-size": ("8b", ["2", "4"], ()),
    "--data-parallel-size": ("gpt-oss-120b", ["2", "4"], ("--tensor-parallel-size", "1")),
    "--decode-context-parallel-size": ("deepseek-ai/DeepSeek-V2-Lite", ["2", "4"], ("--tensor-parallel-size", "4")),
    "--max-model-len": ("8b", ["4096", "8192", "65536"], ()),
    "--max-num-seqs": ("8b", ["1", "16", "512"], ()),
    "--max-num-batched-tokens": ("8b", ["2048", "16384", "65536"], ()),
    "--kv-cache-memory-bytes": ("8b", ["20000000000", "30000000000"], ()),
    "--block-size": ("8b", ["32", "64"], ()),
    "--gpu-memory-utilization": ("8b", ["0.5", "0.8"], ()),
    "--dtype": ("8b", ["float32"], ()),
    "--quantization": ("8b", ["fp8"], ()),
    "--kv-cache-dtype": ("8b", ["fp8"], ()),
    "--enforce-eager": ("8b", [""], ()),
    "--enable-expert-parallel": ("gpt-oss-120b", [""], ("--tensor-parallel-size", "4")),
    "--all2all-backend": ("gpt-oss-120b", ["deepep_low_latency"], RANKS),
    "--async-scheduling": ("8b", [""], ()),
    "--enable-lora": ("8b", [""], ()),
    "--max-loras": ("8b", ["2", "8"], LORA),
    "--max-lora-rank": ("8b", ["32", "64"], LORA),
    "--fully-sharded-loras": ("8b", [""], (*LORA, "--tensor-parallel-size", "4")),
    "--lora-target-modules": ("8b", ["q_proj", "o_proj"], LORA),
    "--cpu-offload-gb": ("8b", ["2", "4"], ()),
    "--enable-prefix-caching": ("Qwen/Qwen3-Next-80B-A3B-Instruct", ["no"], ()),
    "--language-model-only": ("gemma-3-27b", [""], ()),
    "--limit-mm-per-prompt": ("gemma-3-27b", ['{"image": 0}', '{"image": 2}'], ()),
    "--speculative-config": ("zai-org/GLM-4.6", [MTP], ()),
    "--kv-transfer-config": ("8b", ['{"kv_connector": "NixlConnector"}'], ()),
    "--kv-offloading-size": ("8b", ["32"], ()),
    "--compilation-config": ("8b", GRAPHS, ()),
    "--optimization-level": ("8b", ["0", "1"], ()),
    "--disable-hybrid-kv-cache-manager": ("gemma-3-27b", [""], ()),
    "--mamba-ssm-cache-dtype": ("Qwen/Qwen3.5-27B", ["bfloat16"], ()),
    "--enable-eplb": ("gpt-oss-120b", [""], EXPERTS),
    "--eplb-config": ("gpt-oss-120b", ['{"num_redundant_experts": 4}'], (*EXPERTS, "--enable-eplb")),
    "--runner": ("8b", ["pooling"], ()),
    "--hf-overrides": ("8b", ['{"max_position_embeddings": 262144}', '{"num_hidden_layers": 16}'], ()),
}
"""--async-scheduling is on in the pinned version, so that its negation is what changes a plan."""
NEGATED = ("--async-scheduling", "--enable-prefix-caching")


def said(model: str, words: tuple[str, ...]) -> tuple[Any, ...]:
    """The figures of a plan, and the reasons that it gives."""
    check_arguments(words, allow_unknown=False)
    given = read_fields(words)
    length = given.pop("max_model_len", None)
    asked = PlanRequest(model=model, engine=EngineConfig(**given), workload=Workload(max_model_len=length))
    config = with_overrides(resolve(model).config, given.get("hf_overrides"))
    of_model = {name: given[name] for name in ("dtype", "quantization") if name in given}
    found = model_from_config(config, name=model, **of_model)
    machines = cluster_named("h200-141gb", num_nodes=1, gpus_per_node=8)
    result = make_plan(asked, FoundParts(model=found, cluster=machines))
    chosen = result.chosen
    speeds = tuple((one.expected.output_tokens_per_s, one.expected.ttft_s) for one in result.estimates())
    return (chosen.layout, chosen.memory, speeds, chosen.reasons)


def test_every_option_is_counted_uncounted_or_without_effect() -> None:
    """A new version of vLLM has new options: say of each what it is."""
    lists = [set(COUNTED), set(PASSED_OVER["uncounted"]), set(PASSED_OVER["without_effect"])]
    passing = {name for name, kind in classes().items() if kind in ("free", "owner")}
    assert sum(len(one) for one in lists) == len(passing)
    assert set().union(*lists) == passing


@pytest.mark.parametrize("option", COUNTED)
def test_an_option_that_is_counted_changes_the_plan(option: str) -> None:
    model, values, beside = COUNTED[option]
    found = [said(model, beside)]
    for value in values:
        name = option.replace("--", "--no-", 1) if option in NEGATED else option
        words = (name, value) if value and option not in NEGATED else (name,)
        found.append(said(model, (*beside, *words)))
    assert all(one != other for index, one in enumerate(found) for other in found[:index])


def test_what_is_not_counted_is_said() -> None:
    said_of = {option: read_fields([option])["uncounted"] for option in PASSED_OVER["uncounted"]}
    assert said_of == {option: (option,) for option in PASSED_OVER["uncounted"]}


def test_a_plan_says_by_name_what_it_does_not_count() -> None:
    words = ("--attention-backend", "FLASHINFER", "--stream-interval", "4", "--convert", "none")
    *figures, reasons = said("8b", words)
    *plain, _ = said("8b", ())
    assert figures == plain
    (note,) = [reason for reason in reasons if reason.startswith("Not counted")]
    assert note.startswith("Not counted: --attention-backend, --convert, --stream-interval. vLLM may need")
    assert not any(reason.startswith("Not counted") for reason in said("8b", ("--seed", "1"))[-1])


def test_what_is_not_taken_is_refused_by_name() -> None:
    for option in (name for name, kind in classes().items() if kind in ("ours", "refused")):
        with pytest.raises(InvalidRequestError, match=option):
            check_arguments([option, "1"], allow_unknown=False)


NONSENSE = ("", "0", "-1", "-0.5", "nan", "1e400", "999999999999999999999", "x", "{", "[]", "null")
IN_OBJECTS = {
    "--speculative-config": ("method", "model", "num_speculative_tokens"),
    "--limit-mm-per-prompt": ("image",),
    "--kv-transfer-config": ("kv_connector",),
    "--compilation-config": ("mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    "--eplb-config": ("num_redundant_experts",),
    "--hf-overrides": ("max_position_embeddings", "rope_parameters", "text_config", "architectures"),
}


@pytest.mark.parametrize("option", COUNTED)
def test_a_value_of_nonsense_is_an_error_in_words_or_a_plan(option: str) -> None:
    model, _, beside = COUNTED[option]
    inside = [
        json.dumps({key: one}) for key in IN_OBJECTS.get(option, ()) for one in (None, -1, 0.5, "x", [1], {"a": 1})
    ]
    for value in (*NONSENSE, *inside):
        words = ""
        try:
            said(model, (*beside, f"{option}={value}"))
        except HpcServeError as error:
            words = str(error) or "nothing"
        assert words != "nothing", value
        assert len(words) < 2000, value


@pytest.mark.parametrize("limit", ['{"image": -1}', '{"image": "x"}', '{"image": 2.5}', '{"image": {"count": -1}}'])
def test_a_limit_of_images_is_what_vllm_takes(limit: str) -> None:
    """By vLLM 0.32's config/multimodal.py, which refuses these."""
    with pytest.raises(InvalidRequestError, match=r"limit_mm_per_prompt is .*: it must be a JSON object of numbers"):
        said("8b", ("--limit-mm-per-prompt", limit))
    said("8b", ("--limit-mm-per-prompt", '{"image": {"count": 2, "width": 512}, "video": 0}'))
