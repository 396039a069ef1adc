"""Measures which keys of a model's config change its weights: transformers builds the model without memory, key by key.

It writes what the planner may pass over (hpc_serve/plan/catalog/config_keys.json) and what the tests hold the planner
against (tests/unit/plan/config_key_effects.json). Run it when the pinned transformers or the list of families changes:

    python -m tests.support.config_keys
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.arguments import given_words

ROOT = Path(__file__).parents[2]
KEYS = ROOT / "hpc_serve" / "plan" / "catalog" / "config_keys.json"
EFFECTS = ROOT / "tests" / "unit" / "plan" / "config_key_effects.json"

_LAYERS = 4
_BY_LAYER = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "indexer_types"),
    *("num_attention_heads_per_layer", "layer_rope_theta"),
)
_SHORT_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "full_attn_idxs": None}
_GIVEN: dict[str, dict[str, Any]] = {
    "Gemma3nForCausalLM": {
        **{"num_kv_shared_layers": 2, "intermediate_size": 16384, "activation_sparsity_pattern": [0.0] * 4},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Gemma4ForConditionalGeneration": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {"1": {"head_dim": 512}, "3": {"head_dim": 512}},
        },
        "vision_config": {
            **{"model_type": "gemma4_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4},
            **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16},
            **{"position_embedding_size": 10240, "pooling_kernel_size": 3},
        },
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "JambaForCausalLM": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "LagunaForCausalLM": {"num_attention_heads_per_layer": [48, 64, 48, 64]},
    "Lfm2ForCausalLM": _SHORT_CONV,
    "Lfm2MoeForCausalLM": {"layer_types": _SHORT_CONV["layer_types"]},
    "Lfm2VlForConditionalGeneration": {"text_config": _SHORT_CONV},
}
"""Fields in place of the default ones, so that the layers have all that the family can have."""
NOT_MEASURED = {
    "Gemma3nForConditionalGeneration": "its tower needs timm",
    "DeepseekV4ForCausalLM": "compress_rates and layer_types in place of compress_ratios",
    "KimiLinearForCausalLM": "layer_types in place of linear_attn_config",
    "NomicBertModel": "hidden_size and others in place of n_embd",
    "MiniMaxM3SparseForConditionalGeneration": "index_n_heads and others in place of sparse_attention_config",
    "Step3p7ForConditionalGeneration": "hidden_size of the tower in place of width",
}
"""Architectures that are not measured, and why. Most have other names in published configs than transformers writes."""
_NOT_LOADED = "pooler."
"""What transformers adds to encoders, and vLLM leaves out of embedders."""
_MADE_BY = "python -m tests.support.config_keys"
_NOT_OF_WEIGHTS = ("window", "max_position", "layer_types", "chunk_size", "cache_dtype", "rope_", "block_types")
"""Parts of names of keys that change the cache, the context or the order of layers, though no weight: never passed over
because of this measurement."""


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    from hpc_serve.plan.catalog import architectures

    measured = {}
    whole = {name for name, about in architectures().items() if not about.get("is_draft_head")}
    for name in sorted(whole - set(NOT_MEASURED)):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = measure(name)
        print(name, "not in transformers" if found is None else found["parameters"], file=sys.stderr)
        if found is not None:
            measured[name] = found
    version = importlib.metadata.version("transformers")
    head = {"made_by": _MADE_BY, "transformers": version}
    _write(EFFECTS, {**head, "architectures": measured})
    unchanged = {name: _passed_over(found) for name, found in measured.items()}
    _write(KEYS, {**head, "generic": generic_keys(), "no_weight_changes": unchanged})


def generic_keys() -> list[str]:
    """The keys that any config may have: those of transformers' base class, and those of text generation."""
    from transformers import GenerationConfig, PretrainedConfig

    return sorted({*PretrainedConfig().to_dict(), *GenerationConfig().to_dict()} - {"model_type", "architectures"})


def measure(name: str) -> dict[str, Any] | None:
    """The default config of an architecture with few layers, its parameters, and those after a change of each key."""
    import transformers

    model_class = getattr(transformers, name, None)
    if model_class is None:
        return None
    config_class = model_class.config_class
    config = _with(_shortened(config_class().to_dict()), _GIVEN.get(name, {}))
    shapes = _shapes(model_class, config)
    assert shapes is not None, name
    effects: dict[str, list[Any]] = {}
    for path, value in _leaves(config):
        changed = copy.deepcopy(config)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        after = _shapes(model_class, changed)
        # [the key's other value, the parameters then (null: no such model), whether any weight is of another size]
        parameters = None if after is None else sum(after.values())
        effects[".".join(path)] = [value, parameters, after != shapes]
    return {"config": {**config, "architectures": [name]}, "parameters": sum(shapes.values()), "effects": effects}


def _with(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The config with these fields in place of its own."""
    changed = {**config}
    for key, value in given.items():
        changed[key] = _with(changed.get(key) or {}, value) if isinstance(value, dict) else value
    return changed


def _shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The config with few layers."""
    short: dict[str, Any] = {}
    for key, value in config.items():
        if key == "per_layer_config" and value:
            short[key] = {index: one for index, one in value.items() if int(index) < _LAYERS}
        elif isinstance(value, dict) and key.endswith("_config"):
            short[key] = _shortened(value)
        elif key in ("num_hidden_layers", "depth"):
            short[key] = _LAYERS
        elif key in _BY_LAYER and value:
            short[key] = value[:_LAYERS]
        elif key in ("moe_layers", "full_attn_idxs") and value:
            short[key] = [index for index in value if index < _LAYERS]
        else:
            short[key] = value
    return short


def _leaves(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each key that has a number, or nothing, with another number."""
    for key, value in config.items():
        if key in ("architectures", "dtype"):
            continue
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, bool):
            yield (*path, key), not value
        elif (isinstance(value, int) and value > 0) or isinstance(value, float):
            yield (*path, key), 2 * value
        elif value is None:
            yield (*path, key), 2


def _shapes(model_class: Any, config: dict[str, Any]) -> dict[str, int] | None:
    """Elements of every parameter by name, tied ones once, or None where the model cannot be built."""
    import torch

    try:
        with torch.device("meta"):
            model = model_class._from_config(model_class.config_class.from_dict(copy.deepcopy(config)))
            model.tie_weights()
    except Exception:
        return None
    of_vllm = (pair for pair in model.named_parameters() if not pair[0].startswith(_NOT_LOADED))
    return {name: parameter.numel() for name, parameter in of_vllm}


def _passed_over(found: dict[str, Any]) -> list[str]:
    return sorted(
        path
        for path, effect in found["effects"].items()
        if not effect[2] and not any(part in path for part in _NOT_OF_WEIGHTS)
    )


def _write(file: Path, value: dict[str, Any]) -> None:
    """As JSON with one line for each field of the values two deep, so that a difference is short."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            entries = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in inner.items()
            )
            lines.append(f" {json.dumps(key)}: {{\n{entries}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(inner)}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    given_words(__doc__, 0)
    main()
