"""Finds a model's config: the catalogue, a folder, or a path to a config.json. What it means is plan/model.py's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.plan import catalog


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's config and where it is from.

    `name` is what `vllm serve` takes (repository or folder); `served_model_names` are that and the alias asked for.
    """

    name: str
    served_model_names: tuple[str, ...]
    config: Mapping[str, Any]


def find_model(name: str) -> FoundModel:
    """The config of a catalogue alias, a repository, a folder, or a path to a config.json.

    Raises UnknownModelError where there is none, InvalidRequestError where it cannot be read.
    """
    entry = catalog.find(name)
    if entry is not None:
        names = (entry.name,) if name.lower() == entry.name.lower() else (entry.name, name.lower())
        return FoundModel(name=entry.name, served_model_names=names, config=entry.config)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        folder = file.parent.absolute()
        return FoundModel(name=str(folder), served_model_names=(folder.name,), config=_read(file))
    raise UnknownModelError(f"No model is known as {name!r}.{catalog.suggestion(name)}")


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{file} cannot be read as a model's config: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{file} is not a model's config: it holds no JSON object.")
    return config
