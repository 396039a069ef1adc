"""GPTQModel's `dynamic` rules: modules of a checkpoint with other bits or groups than the rest, or with none.

The first rule that matches a module's name decides. vLLM matches the names of its modules, and q, k and v are one
matrix there. Follows vLLM's quantization/utils/gptq_utils.py and quantization/auto_gptq.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.scheme import Scheme, int_groups
from hpc_serve.plan.model.skipped_modules import MOST_EXPRESSIONS, checked_expression

_BITS = (4, 8)
FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "experts": ("experts", ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj")),
}
"""vLLM's names of fused modules, by the names that hpc_serve has for them, and their names in a checkpoint."""
DynamicRules: TypeAlias = tuple[tuple[str, Scheme], ...]
"""Each rule's expression for the beginning of a module's name, and the scheme of the modules that it matches."""


def dynamic_rules(config: Mapping[str, Any], plain: Scheme) -> DynamicRules:
    """Return the rules of a `quantization_config`. Raises InvalidRequestError for what vLLM refuses."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise InvalidRequestError("The config's quantization_config.dynamic must be an object.")
    if len(dynamic) > MOST_EXPRESSIONS:
        raise InvalidRequestError(f"quantization_config.dynamic has more than {MOST_EXPRESSIONS:,} rules.")
    rules = []
    for pattern, settings in dynamic.items():
        scheme = plain if pattern.startswith("-:") else _checked_scheme(config, pattern, settings)
        rules.append((checked_expression(pattern.removeprefix("-:" if scheme is plain else "+:")), scheme))
    return tuple(rules)


def _checked_scheme(config: Mapping[str, Any], pattern: str, settings: Any) -> Scheme:
    """Return the scheme of a rule's modules. Raises InvalidRequestError where vLLM refuses it."""
    if not isinstance(settings, Mapping) or "gptq" not in str(config.get("quant_method")):
        raise InvalidRequestError(
            f"quantization_config.dynamic has no settings of GPTQ for {pattern[:60]!r}: vLLM takes such rules, each an "
            "object, with quant_method gptq alone."
        )
    whole = {"bits": 4, "group_size": 128, "sym": True, **config, **settings}
    bits, group, ordered = whole["bits"], whole["group_size"], whole.get("desc_act")
    if type(bits) is not int or bits not in _BITS or type(group) is not int or not whole["sym"]:
        raise InvalidRequestError(
            f"quantization_config.dynamic has bits={str(bits)[:20]}, group_size={str(group)[:20]} and "
            f"sym={str(whole['sym'])[:20]} for {pattern[:60]!r}: vLLM takes 4 or 8 bits with sym alone."
        )
    if ordered and group != -1:
        raise InvalidRequestError(
            f"quantization_config.dynamic has desc_act with groups of {group} for {pattern[:60]!r}: vLLM takes "
            "desc_act with group_size -1 alone."
        )
    return int_groups(bits, group, zero_points=False)


def dynamic_scheme(rules: DynamicRules, base: Scheme, plain: Scheme, module: str, *, is_fused: bool) -> Scheme:
    """Return the scheme of a module. `is_fused`: vLLM holds it and those beside it in the checkpoint as one matrix.

    Raises InvalidRequestError where the checkpoint's modules have another scheme than vLLM's one matrix.
    """
    last = module.rpartition(".")[2]
    before = module.removesuffix(last)
    fused, names = FUSED.get(last, (last, (last,))) if is_fused else (last, (last,))
    found = _first_match(rules, base, before + fused)
    own = {_first_match(rules, base, before + name) for name in names}
    if own in ({base}, {found}):
        return found
    if own == {plain} and last != "experts":
        return plain
    kinds = " and ".join(sorted({scheme.name for scheme in own | {found}}))
    raise InvalidRequestError(
        f"quantization_config.dynamic asks for {kinds} in {before}{fused}: vLLM takes one kind for this name, and "
        f"cannot load {', '.join(names)} of another."
    )


def _first_match(rules: DynamicRules, base: Scheme, name: str) -> Scheme:
    return next((scheme for rule, (_, scheme) in zip(_compiled(rules), rules) if rule.match(name)), base)


@lru_cache(maxsize=8)
def _compiled(rules: DynamicRules) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(expression) for expression, _ in rules)
