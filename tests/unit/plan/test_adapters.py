"""Whether a model takes an adapter is told by the files of the adapter, before an engine sees it."""

from __future__ import annotations

import re

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.checkpoint import RANKS, check_shapes, least_rank, read_adapter
from hpc_serve.vllm.arguments import options
from tests.support.configs import built

CONFIG = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/base"}


def shapes(module: str, layer: int, inputs: int, outputs: int, rank: int = 8) -> dict[str, tuple[int, int]]:
    name = f"base_model.model.model.layers.{layer}.{module}"
    return {f"{name}.lora_A.weight": (rank, inputs), f"{name}.lora_B.weight": (outputs, rank)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "it is a DoRA"),
        ({"bias": "all"}, "it has a bias"),
        ({"lora_bias": True}, "it has a bias"),
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"modules_to_save": ["lm_head", "score"]}, "whole modules (lm_head)"),
        ({"init_lora_weights": "pissa"}, "pissa has changed the weights"),
        ({"r": 0}, "must be 1 or more"),
        ({"r": "8"}, "must be 1 or more"),
        ({"rank_pattern": {"q_proj": -1}}, "must be 1 or more"),
        ({"rank_pattern": [64]}, "must be 1 or more"),
        ({"modules_to_save": "lm_head"}, "whole modules (lm_head)"),
        ({"modules_to_save": 5}, "whole modules (5)"),
    ],
)
def test_what_vllm_refuses_is_refused_before(changes, said):
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        read_adapter("/a", {**CONFIG, **changes}, {})


def test_the_largest_rank_counts():
    adapter = read_adapter("/a", {**CONFIG, "rank_pattern": {"q_proj": 64}, "init_lora_weights": "gaussian"}, {})
    assert (adapter.rank, adapter.base) == (64, "org/base")


def test_ranks_are_those_that_the_option_takes():
    assert options()["--max-lora-rank"].choices == RANKS
    with pytest.raises(InvalidRequestError, match="512 at most"):
        least_rank(513)


@pytest.mark.parametrize(
    ("name", "module", "inputs", "outputs"),
    [
        ("8b", "self_attn.q_proj", 4096, 4096),
        ("8b", "self_attn.k_proj", 4096, 1024),
        ("8b", "self_attn.o_proj", 4096, 4096),
        ("8b", "mlp.gate_proj", 4096, 14336),
        ("8b", "mlp.down_proj", 14336, 4096),
        ("Qwen/Qwen3-30B-A3B", "mlp.experts.7.up_proj", 2048, 768),
        ("r1", "self_attn.kv_a_proj_with_mqa", 7168, 576),
        ("openai/gpt-oss-20b", "self_attn.q_proj", 2880, 4096),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "self_attn.q_proj", 2048, 8192),
    ],
)
def test_a_matrix_of_the_model_fits_alone_or_as_a_part_of_fused_ones(name, module, inputs, outputs):
    layer = len(built(name).layers) - 1
    check_shapes(read_adapter("/a", CONFIG, shapes(module, layer, inputs, outputs)), built(name))
    for wrong in ((inputs + 8, outputs), (inputs, outputs + 8)):
        with pytest.raises(InvalidRequestError, match=r"has no such matrix\. It was trained on org/base\."):
            check_shapes(read_adapter("/a", CONFIG, shapes(module, layer, *wrong)), built(name))


@pytest.mark.parametrize(("module", "outputs"), [("in_proj_qkv", 10240), ("in_proj_z", 6144), ("in_proj_a", 48)])
def test_a_matrix_may_be_several_of_those_that_vllm_fuses(module, outputs):
    qwen = built("Qwen/Qwen3.5-27B")
    check_shapes(read_adapter("/a", CONFIG, shapes(f"linear_attn.{module}", 0, 5120, outputs)), qwen)


@pytest.mark.parametrize(
    "module",
    [
        "base_model.model.model.visual.layers.0.attn.qkv",
        "base_model.model.mtp.layers.0.self_attn.q_proj",
        "base_model.model.model.layers.0.mlp.experts",
        "base_model.model.model.layers.0.mlp.experts.base_layer",
        f"base_model.model.model.layers.{'9' * 5000}.q_proj",
    ],
)
def test_matrices_outside_of_the_decoders_layers_are_left_to_vllm(module):
    tensors = {f"{module}.lora_A.weight": (8, 3), f"{module}.lora_B.weight": (5, 8)}
    check_shapes(read_adapter("/a", CONFIG, tensors), built("8b"))


def test_a_layer_that_the_model_lacks_is_another_models():
    with pytest.raises(InvalidRequestError, match=r"changes layer 32, and .* has 32 layers"):
        check_shapes(read_adapter("/a", CONFIG, shapes("self_attn.q_proj", 32, 4096, 4096)), built("8b"))


def test_two_matrices_must_fit_each_other():
    torn = {**shapes("self_attn.q_proj", 0, 64, 64), **shapes("self_attn.v_proj", 0, 64, 64, rank=4)}
    torn["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"] = (64, 8)
    with pytest.raises(InvalidRequestError, match="no two matrices that fit"):
        read_adapter("/a", CONFIG, torn)
