"""Configs of models for tests of the planner, by name, and the models that they make."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import DATA, published_configs
from hpc_serve.plan import ModelSpec, model_from_config, resolve
from hpc_serve.plan.model.scheme import Scheme
from hpc_serve.plan.model.spec import Linear

_PLAN = Path(__file__).parents[1] / "unit" / "plan"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


MEASURED = _read(_PLAN / "config_key_effects.json")["architectures"]
"""What `tests.support.config_keys` writes: transformers' default config of each architecture, and its parameters."""
EXCEPTIONS = _read(_PLAN / "config_key_exceptions.json")
VLLM_BYTES = _read(DATA / "vllm_weight_bytes.json")
PUBLISHED = {entry["name"].split("/")[1]: entry["config"] for entry in published_configs()}
CONFIGS = {
    **PUBLISHED,
    **VLLM_BYTES["configs"],
    **{architecture: about["config"] for architecture, about in MEASURED.items()},
    **_read(_PLAN / "configs.json"),
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The config of a published model, of a shape that vLLM has counted, of an architecture, or of the catalogue."""
    return {**(CONFIGS.get(name) or resolve(name).config), **changes}


def with_value(config: Mapping[str, Any], path: str | Sequence[Any], value: Any) -> dict[str, Any]:
    """The config with another value at a place; a text has the parts of its path with dots between them."""
    copied: dict[str, Any] = copy.deepcopy(dict(config))
    parts: Sequence[Any] = path.split(".") if isinstance(path, str) else path
    inner: Any = copied
    for key in parts[:-1]:
        inner = inner[key]
    inner[parts[-1]] = value
    return copied


def built(config: str | Mapping[str, Any], **options: Any) -> ModelSpec:
    """The model of a config, or of the config of that name. `options` are those of `model_from_config`."""
    return model_from_config(config_of(config) if isinstance(config, str) else config, **{"name": "x", **options})


def made(name: str, **changes: Any) -> ModelSpec:
    """The model of the config of that name, with these fields."""
    return built(config_of(name, **changes), name=name)


def schemes_of(model: ModelSpec) -> list[dict[str, Scheme]]:
    """The scheme of each matrix, by name, of each layer."""
    matrices = ([one for one in layer.block.weights if isinstance(one, Linear)] for layer in model.layers)
    return [{weight.name: weight.scheme for weight in layer} for layer in matrices]
