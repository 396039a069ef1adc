"""Finds the folder of a LoRA adapter, here or in the Hugging Face cache, and reads what its files say of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import read_json
from hpc_serve.hub.hub_settings import read_hub_settings
from hpc_serve.hub.local_weights import read_header, snapshot_folder
from hpc_serve.plan.model.adapters import AdapterFiles, read_adapter

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def find_adapter(named: str) -> AdapterFiles:
    """Return the adapter in a folder, or of a repository in the cache. Raises InvalidRequestError."""
    folder = Path(named).expanduser().absolute()
    if not folder.is_dir():
        cached = snapshot_folder(read_hub_settings(os.environ).cache, named, "main", holds=_CONFIG)
        if cached is None:
            cure = f" Fetch it first: hpc-serve fetch {named}" if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", named) else ""
            raise InvalidRequestError(f"{named} is neither a folder nor an adapter in the Hugging Face cache.{cure}")
        folder = cached
    lacking = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise InvalidRequestError(f"{folder} is no adapter: it has no {' and no '.join(lacking)}.")
    file = folder / _CONFIG
    try:
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        file = folder / _WEIGHTS
        header, _ = read_header(file)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}.") from error
    return read_adapter(str(folder), config, shapes)
