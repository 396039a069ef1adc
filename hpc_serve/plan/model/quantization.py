"""Which scheme each module of a checkpoint has, by the `quantization_config` of its Hugging Face config.

scheme.py knows how many bytes a scheme takes, which names a pattern matches, and GPTQModel's `dynamic` rules. The type
of the KV cache is read here, but decided in memory/kv_cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.scheme import (
    BNB_INT4,
    BNB_INT8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
    DynamicRules,
    Scheme,
    dynamic_rules,
    dynamic_scheme,
    fp8_blocks,
    int_groups,
    is_skipped,
)

QUANTIZATION_FILE = "hf_quant_config.json"
_SKIP_KEYS = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules", "llm_int8_skip_modules"),
)
_BEFORE_LAYERS = re.compile(r"^.*?(?=layers\.\d+\.|lm_head$)")
_DEFAULT_CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp8": {"quant_method": "fp8"},
    "fp8_per_tensor": {"quant_method": "fp8"},
    "fp8_per_channel": {"quant_method": "fbgemm_fp8"},
    "fp8_per_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {"quant_method": "int8"},
    "int8_per_channel_weight_only": {"quant_method": "experts_int8"},  # vLLM's own; dense layers stay in 16 bit
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "mxfp8": {"quant_method": "mxfp8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
_MODELOPT = {
    "FP8": FP8_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": FP8_BLOCK,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": MXFP8,
}


def _mixed_precision(config: Mapping[str, Any]) -> Mapping[str, Scheme] | None:
    """Return the scheme of each module that ModelOpt's MIXED_PRECISION names. None: it is one scheme for all."""
    settings = config.get("quantization") or config
    if str(settings.get("quant_algo")).upper() != "MIXED_PRECISION":
        return None
    layers = settings.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise InvalidRequestError("quantization_config of MIXED_PRECISION has no quantized_layers.")
    found: dict[str, Scheme] = {}
    for name, about in layers.items():
        scheme = _modelopt_scheme(about if isinstance(about, Mapping) else {})
        if found.setdefault(_from_layers(str(name)), scheme) != scheme:
            raise InvalidRequestError(
                f"quantization_config has experts of different kinds in {_from_layers(str(name))[:60]}: this planner "
                "knows one kind for the experts of a layer."
            )
    return found


def _from_layers(module: str) -> str:
    """Return a module's name without what comes before its layer's number, and the experts of a layer as one.

    >>> _from_layers("model.language_model.layers.3.mlp.experts.7.up_proj")
    'layers.3.mlp.experts'
    """
    name = _BEFORE_LAYERS.sub("", module, count=1)
    return name.split(".experts.", 1)[0] + ".experts" if ".experts." in name else name


def _modelopt_scheme(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme of one of ModelOpt's algorithms. Raises InvalidRequestError for another."""
    named = settings.get("quant_algo", "FP8")
    found = _MODELOPT.get(str(named).upper())
    if found is None:
        raise InvalidRequestError(
            f"quantization_config of modelopt has quant_algo {str(named)[:40]!r}, which this planner does not "
            f"know; it knows {', '.join(_MODELOPT)} and MIXED_PRECISION."
        )
    group = settings.get("group_size")
    if found.group and group not in (None, found.group):
        raise InvalidRequestError(f"quantization_config has group_size {group}: {named} has groups of {found.group}.")
    return found


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which scheme each module has: `linear` layers, fused `experts`, and `plain` for `skipped` names.

    `kv_cache_dtype` is the type that the checkpoint asks for, if any. `is_assumed`: a person asked for the method, and
    the checkpoint does not have it. `is_of_16_bit`: the checkpoint is not quantised. If `by_module` is given, it names
    all quantised modules, from "layers." on, with the experts of a layer as one. `is_skipped` says what a pattern in
    `skipped` may be, `dynamic_rules` what `dynamic` is.
    """

    method: str
    plain: Scheme
    linear: Scheme
    experts: Scheme
    head: Scheme
    skipped: tuple[str, ...] = ()
    kv_cache_dtype: str | None = None
    is_assumed: bool = False
    is_of_16_bit: bool = True
    by_module: Mapping[str, Scheme] | None = None
    dynamic: DynamicRules = ()

    def scheme_of(self, module: str, *, is_expert: bool = False, is_fused: bool = False) -> Scheme:
        """Return the scheme of a linear module, by its name in the checkpoint. `is_fused`: vLLM makes one of several.

        Raises InvalidRequestError where a checkpoint has them in several schemes.
        """
        if self.by_module is not None:
            return self.by_module.get(_from_layers(module), self.plain)
        scheme = self.experts if is_expert else self.linear
        if scheme is self.plain or (self.skipped and is_skipped(module, self.skipped)):
            return self.plain
        if not self.dynamic:
            return scheme
        return dynamic_scheme(self.dynamic, scheme, self.plain, module, is_fused=is_fused or is_expert)


def quantization_from_config(
    config: Mapping[str, Any] | None, *, plain: Scheme, override: str | None = None
) -> Quantization:
    """Return the quantization of a `quantization_config`. `override` is vLLM's --quantization: as if quantised with it.

    Raises InvalidRequestError for a method that the planner does not know.
    """
    declared, is_of_16_bit = str((config or {}).get("quant_method", "")), not config
    is_assumed = override is not None and _normal(declared) != re.sub(r"(_marlin|_machete)$", "", _normal(override))
    if override is not None and is_assumed:
        config = _DEFAULT_CONFIGS.get(_normal(override))
        if config is None:
            raise InvalidRequestError(
                f"quantization is {override!r}: this planner knows {', '.join(sorted(_DEFAULT_CONFIGS))}."
            )
    if not config:
        return Quantization(method="none", plain=plain, linear=plain, experts=plain, head=plain)
    method = config.get("quant_method")
    if not method and isinstance(producer := config.get("producer"), Mapping):  # ModelOpt's, in place of a method
        method = producer.get("name")
    method = _normal(str(method or ""))
    by_module = _mixed_precision(config) if method.startswith("modelopt") else None
    if by_module is None:
        linear, experts, head = _schemes(method, config, plain)
    else:
        linear, experts, head = plain, plain, by_module.get("lm_head", plain)
    dynamic = dynamic_rules(config, plain)
    if dynamic and head is not plain:
        head = dynamic_scheme(dynamic, head, plain, "lm_head", is_fused=False)
    return Quantization(
        method=method,
        plain=plain,
        linear=linear,
        experts=experts,
        head=head,
        skipped=_skipped(config),
        kv_cache_dtype=_kv_cache_dtype(config),
        is_assumed=is_assumed,
        is_of_16_bit=is_of_16_bit,
        by_module=by_module,
        dynamic=dynamic,
    )


def _skipped(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of modules that are not quantised, under the key of each method."""
    inner = config.get("quantization") or {}
    return tuple(str(name) for key in _SKIP_KEYS for name in config.get(key) or inner.get(key) or ())


def _normal(method: str) -> str:
    return method.lower().replace("-", "_")


def with_quantization_file(config: Mapping[str, Any], beside: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with ModelOpt's QUANTIZATION_FILE, which lies `beside` it. Unchanged if `beside` is empty."""
    return {**config, "quantization_config": {"quant_method": "modelopt", **beside}} if beside else config


def _schemes(method: str, config: Mapping[str, Any], plain: Scheme) -> tuple[Scheme, Scheme, Scheme]:
    """Return the schemes of (linear layers, experts, output head) for a method."""
    if method == "fp8":
        block = config.get("weight_block_size")
        scheme = fp8_blocks(block) if block else FP8_TENSOR
        has_fp4_experts = config.get("expert_dtype") == "fp4"  # as DeepSeek V4's configs say
        four_bits = NVFP4 if str(config.get("moe_quant_algo")).upper() == "NVFP4" else MXFP4
        return scheme, four_bits if has_fp4_experts else scheme, plain
    if method in ("experts_int8", "mxfp4"):
        return plain, INT8_CHANNEL if method == "experts_int8" else MXFP4, plain
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        asymmetric = bool(config.get("zero_point", True)) if "awq" in method else not config.get("sym", True)
        bits, group = int(config.get("bits", config.get("w_bit", 4))), int(config.get("group_size", 128))
        scheme = int_groups(bits, group, asymmetric)
        return scheme, scheme, scheme if config.get("lm_head") else plain
    scheme = _scheme_for_all(method, config)
    return scheme, scheme, plain


def _scheme_for_all(method: str, config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a method that has one for linear layers and experts."""
    if method.startswith("modelopt"):
        return _modelopt_scheme(config.get("quantization") or config)
    if method == "compressed_tensors":
        return _compressed_tensors(config)
    if method == "quark":
        return _quark(config)
    if method == "bitsandbytes":
        return BNB_INT8 if config.get("load_in_8bit") else BNB_INT4
    if method in ("fbgemm_fp8", "int8", "mxfp8"):
        return {"fbgemm_fp8": FP8_CHANNEL, "int8": INT8_CHANNEL, "mxfp8": MXFP8}[method]
    raise InvalidRequestError(
        f"quantization_config has quant_method {config.get('quant_method')!r}, which this planner does not know; "
        "it knows fp8, fbgemm_fp8, int8, awq, gptq, bitsandbytes, mxfp4, mxfp8, modelopt, compressed-tensors and quark."
    )


def _kv_cache_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the KV cache's type by the checkpoint: `get_kv_cache_quant_algo_string` in vLLM's utils/torch_utils.py."""
    inner = config.get("quantization") or config
    algorithm = inner.get("kv_cache_scheme") or config.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(algorithm, Mapping):
        return "fp8" if algorithm.get("type") == "float" and algorithm.get("num_bits") == 8 else None
    return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(algorithm).upper()) if algorithm else None


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of compressed-tensors, which all its groups must share."""
    groups = config.get("config_groups") or {}
    schemes = {_weights_scheme(groups[name]["weights"]) for name in groups if groups[name].get("weights")}
    if not schemes:
        raise InvalidRequestError("quantization_config of compressed-tensors has no config_groups with weights.")
    if len(schemes) > 1:
        names = " and ".join(sorted(scheme.name for scheme in schemes))
        raise InvalidRequestError(
            f"quantization_config of compressed-tensors has groups of different kinds, {names}: this planner knows one "
            "kind for all."
        )
    return schemes.pop()


def _weights_scheme(weights: Mapping[str, Any]) -> Scheme:
    """Return the scheme of what a group of compressed-tensors says of its weights."""
    bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
    strategy, group = str(weights.get("strategy", "tensor")), int(weights.get("group_size") or 0)
    if kind == "float" and bits == 4:
        if group not in (0, NVFP4.group, MXFP4.group):
            raise InvalidRequestError(
                f"quantization_config has group_size {group}: nvfp4 has {NVFP4.group}, mxfp4 {MXFP4.group}."
            )
        return NVFP4 if group == NVFP4.group else MXFP4
    if strategy == "group":
        return int_groups(bits, group, not weights.get("symmetric", True))
    if kind == "float":
        return {"channel": FP8_CHANNEL, "block": FP8_BLOCK}.get(strategy, FP8_TENSOR)
    return INT8_CHANNEL if bits == 8 else int_groups(bits, -1, False)


def _quark(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AMD's Quark, by the specification for all weights."""
    weights = (config.get("global_quant_config") or {}).get("weight") or {}
    kind, strategy = str(weights.get("dtype")), str(weights.get("qscheme", "per_tensor"))
    known = {
        ("fp8_e4m3", "per_tensor"): FP8_TENSOR,
        ("fp8_e4m3", "per_channel"): FP8_CHANNEL,
        ("fp8_e4m3", "per_block"): FP8_BLOCK,
        ("int8", "per_channel"): INT8_CHANNEL,
        ("fp4", "per_group"): MXFP4,
    }
    group, layers = weights.get("group_size"), config.get("layer_quant_config") or {}
    others = layers.values() if isinstance(layers, Mapping) else [layers]
    if not all(isinstance(layer, Mapping) and layer.get("weight") in (None, weights) for layer in others):
        raise InvalidRequestError(
            "quantization_config of quark has weights of different kinds (layer_quant_config): this planner knows one "
            "kind for all."
        )
    if kind == "int4" and strategy == "per_group":
        return int_groups(4, group or 128, not weights.get("symmetric", True))
    if kind == "fp4" and group not in (None, MXFP4.group):
        raise InvalidRequestError(f"quantization_config has group_size {group}: mxfp4 has groups of {MXFP4.group}.")
    if (kind, strategy) not in known:
        raise InvalidRequestError(
            f"quantization_config of quark has weights in {kind[:40]}, {strategy[:40]}, which this planner does not "
            "know."
        )
    return known[kind, strategy]
