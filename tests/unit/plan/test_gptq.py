"""GPTQModel's `dynamic` rules: which modules have other bits or groups, and against vLLM's own reading of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan import ModelSpec
from hpc_serve.plan.model.scheme import BF16, dynamic_rules, dynamic_scheme, int_groups
from hpc_serve.units import GIB
from tests.support.configs import made

BASE: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
LATER_HALF = r"+:.*\.(?:1[6-9]|2\d|3\d)\..*"


def quantised(dynamic: Any, model: str = "8b", **changes: Any) -> ModelSpec:
    return made(model, quantization_config={**BASE, "dynamic": dynamic, **changes})


@pytest.mark.parametrize(
    ("dynamic", "gib"),
    [
        ({}, 5.31),
        ({LATER_HALF: {"bits": 8}}, 6.93),
        ({LATER_HALF.removeprefix("+:"): {"bits": 8}}, 6.93),
        ({LATER_HALF: {"bits": 8, "group_size": 64}}, 6.98),
        ({"+:.*qkv_proj": {"bits": 8}}, 5.68),
        ({"+:.*(q|k|v)_proj": {"bits": 8}}, 5.68),
        ({"-:.*(q|k|v)_proj": {}}, 6.42),
        ({"-:.*down_proj": {}}, 7.91),
        ({"-:.*down_proj": {}, LATER_HALF: {"bits": 8}}, 9.09),
        ({LATER_HALF: {"bits": 8}, "-:.*down_proj": {}}, 8.23),
        ({"+:lm_head": {"bits": 8}}, 5.31),
    ],
)
def test_the_first_rule_that_matches_decides(dynamic: dict[str, Any], gib: float) -> None:
    assert quantised(dynamic).weight_bytes / GIB == pytest.approx(gib, abs=0.01)


def test_a_rule_for_the_head_counts_where_the_head_is_quantised() -> None:
    four = quantised({}, lm_head=True).weight_bytes
    rows, width = 128_256, 4096
    assert quantised({"+:lm_head": {"bits": 8}}, lm_head=True).weight_bytes == four + rows * width // 2
    assert quantised({"-:lm_head": {}}, lm_head=True).weight_bytes == quantised({}).weight_bytes


@pytest.mark.parametrize(
    ("dynamic", "changes", "says"),
    [
        ({"+:.*q_proj": {"bits": 8}}, {}, r"int4 .* and int8 .* in model.layers.0.self_attn.qkv_proj"),
        ({"-:.*v_proj": {}}, {}, r"bfloat16 and int4 .* in model.layers.0.self_attn.qkv_proj"),
        ({"+:.*gate_proj": {"bits": 8}}, {}, r"in model.layers.0.mlp.gate_up_proj"),
        ({"+:.*mlp.*": {"bits": 3}}, {}, r"bits=3, group_size=128 and sym=True for '\+:.\*mlp.\*'"),
        ({"+:.*mlp.*": {"bits": "8"}}, {}, "bits=8"),
        ({"+:.*mlp.*": {"sym": False}}, {}, "sym=False"),
        ({"+:.*mlp.*": {"desc_act": True}}, {}, "desc_act with groups of 128"),
        ({"+:.*mlp.*": {"bits": 8}}, {"quant_method": "awq"}, "quant_method gptq alone"),
        ({"+:.*mlp.*": 8}, {}, "no settings of GPTQ"),
        ({"+:(": {"bits": 8}}, {}, "does not match"),
        ([1], {}, "must be an object"),
    ],
)
def test_what_vllm_does_not_load_is_refused(dynamic: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        quantised(dynamic, **changes)


def test_experts_are_one_module() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    most = quantised({r"+:.*\.mlp\.experts": {"bits": 8}}, name).weight_bytes
    assert most > 1.8 * quantised({}, name).weight_bytes
    with pytest.raises(InvalidRequestError, match=r"in model.layers.0.mlp.experts"):
        quantised({r"+:.*\.experts\..*": {"bits": 8}}, name)
    with pytest.raises(InvalidRequestError, match=r"in model.layers.0.mlp.experts"):
        quantised({r"-:.*\.experts\..*": {}}, name)


parts = st.sampled_from(
    [".*", "model", r"\.", "layers", "3", "(?:1[0-5])", "mlp", "self_attn", "qkv_proj", "o_proj", "down", "_proj", "$"]
)
patterns = st.builds(
    lambda sign, first, rest: sign + first + "".join(rest),
    st.sampled_from(["", "+:", "-:"]),
    st.sampled_from([".*", r"model\.layers\.", ""]),
    st.lists(parts, max_size=3),
)
overrides = st.fixed_dictionaries(
    {},
    optional={"bits": st.sampled_from([4, 8]), "group_size": st.sampled_from([-1, 32, 64, 128]), "sym": st.just(True)},
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    dynamic=st.dictionaries(patterns, overrides, max_size=4),
    group=st.sampled_from([-1, 128]),
    layer=st.integers(min_value=0, max_value=40),
    module=st.sampled_from(["self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.experts"]),
)
def test_rules_are_read_as_vllm_reads_them(dynamic: dict[str, Any], group: int, layer: int, module: str) -> None:
    pytest.importorskip("vllm", reason="the rules are compared with vLLM's own functions")
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, override_config

    name = f"model.layers.{layer}.{module}"
    settings_of = {**BASE, "group_size": group, "dynamic": dynamic}
    theirs = deepcopy(AutoGPTQConfig.from_config(settings_of))
    ours = dynamic_scheme(dynamic_rules(settings_of, BF16), int_groups(4, group, False), BF16, name, is_fused=False)
    if get_dynamic_override(theirs, layer_name=name) is False:
        assert ours is BF16
        return
    override_config(theirs, prefix=name)
    assert ours == int_groups(theirs.weight_bits, theirs.group_size, False)
