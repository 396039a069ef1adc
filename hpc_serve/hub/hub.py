"""Finds a model's config: in the catalogue, in a folder or a file, in the local Hugging Face cache, or on the hub.

plan/model/ decides what a config means. For local weights, this module reads only the headers of their files. LoRA
adapters are found in the same places. The hub is asked last, for one small file, for a few seconds, and only for names
of the form owner/name. A token goes into the request's header and nowhere else. A refusal becomes an error that says
what to do.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.given_files import is_plain_path, parse_json, read_bounded, read_json
from hpc_serve.hub.local_weights import (
    REACH_THE_HUB,
    HubSettings,
    cached_folder,
    read_header,
    read_hub_settings,
    read_index,
    snapshot_folder,
)
from hpc_serve.hub.needed_files import REPOSITORY, SAFETENSORS_INDEX
from hpc_serve.plan import EngineConfig, ModelSpec, catalog, model_from_config
from hpc_serve.plan.model.architectures import draft_from_config
from hpc_serve.plan.model.checkpoint import AdapterFiles, StoredTensor, StoredWeights, match_checkpoint, read_adapter
from hpc_serve.plan.model.config import with_overrides
from hpc_serve.plan.model.quantization import QUANTIZATION_FILE, with_quantization_file
from hpc_serve.units import MIB

if TYPE_CHECKING:
    import httpx


# -- the hub's answers

_TIMEOUT_S = 5.0
_MAX_CONFIG_BYTES = 10 * MIB


def check_access(repository: str, environ: Mapping[str, str]) -> None:
    """Ask whether this user may fetch a model.

    Raises UnknownModelError where not, InvalidRequestError where the hub does not answer.
    """
    settings = read_hub_settings(environ)
    response = _get_file(settings, repository, "config.json")
    if response is None:
        raise InvalidRequestError(
            f"{settings.endpoint} cannot be reached from here, so whether the job may fetch them is not known: leave "
            "--check-hub out."
        )
    _check_answer(response, repository, settings)


def _get_file(settings: HubSettings, repository: str, file: str) -> httpx.Response | None:
    """Return the hub's answer for a file of a repository; None if the hub does not answer."""
    import httpx

    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    try:
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True) as client:
            return client.get(f"{settings.endpoint}/{repository}/resolve/main/{file}", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def _check_answer(response: httpx.Response, repository: str, settings: HubSettings) -> None:
    """Raise UnknownModelError for an answer that is no file."""
    endpoint, token = settings.endpoint, settings.token
    if response.status_code in (401, 403):
        cure = "your HF_TOKEN may not read it" if token else "set HF_TOKEN to a token that may read it"
        raise UnknownModelError(
            f"{repository} is private, gated or not there (HTTP {response.status_code}): accept its licence at "
            f"{endpoint}/{repository} where it has one; {cure}."
        )
    if response.status_code == 404:
        raise UnknownModelError(f"{endpoint} has no {repository}, or it has no config.json.")
    if response.status_code != 200 or len(response.content) > _MAX_CONFIG_BYTES:
        raise UnknownModelError(
            f"{endpoint} answered HTTP {response.status_code} for {repository}: try again later, or name a folder."
        )


# -- models

_EMBEDDERS_FILE = "modules.json"


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's config and where it is from.

    `name` is what `vllm serve` takes (repository or folder), `served_model_names` are that and the alias asked for,
    `origin` says where the config was found, `folder` is where weights may lie. `note` is the catalogue's; `warning`
    says that config and files do not agree. `engine` are options that vLLM serves it with, by EngineConfig's names.
    """

    name: str
    served_model_names: tuple[str, ...]
    config: Mapping[str, Any]
    origin: str = "the catalogue"
    note: str | None = None
    warning: str | None = None
    folder: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def find_model(name: str, *, environ: Mapping[str, str] = os.environ) -> FoundModel:
    """Return the config of a catalogue alias, a repository, a folder, or a path to a config.json.

    Raises UnknownModelError where there is none (or it may not be seen), InvalidRequestError where it cannot be read.
    """
    path = Path(name).expanduser()
    looks_like_a_path = name.startswith(("/", ".", "~")) or name.endswith(".json")
    if not looks_like_a_path and (entry := catalog.find(name)) is not None:
        names = (entry.name,) if name.lower() == entry.name.lower() else (entry.name, name.lower())
        found = FoundModel(name=entry.name, served_model_names=names, config=entry.config, note=entry.note)
        return replace(found, folder=cached_folder(entry.name, environ), engine=entry.engine)
    if path.is_dir() or path.is_file():
        return _from_folder(path)
    if looks_like_a_path:
        raise UnknownModelError(f"There is no folder or file {name!r}, so no model can be read from it.")
    try:
        if not REPOSITORY.fullmatch(name):
            raise UnknownModelError(f"No model is known as {name!r}.")
        cached = cached_folder(name, environ)
        if cached is None:
            config, origin = _config(partial(_on_hub, read_hub_settings(environ), name)), "the hub"
        else:
            config, origin = _config(partial(_in_folder, cached)), "the Hugging Face cache"
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}{catalog.did_you_mean(name)}") from None
    return FoundModel(
        name=name, served_model_names=(name,), config=config, origin=origin, folder=cached, engine=_options(cached)
    )


def find_spec(
    name: str,
    engine: EngineConfig | None = None,
    *,
    stand_in: str | None = None,
    allow_unknown_keys: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> tuple[FoundModel, ModelSpec, ModelSpec | None]:
    """Return a model, its spec as the engine loads it, and the draft model's spec.

    All files are read first. If the model's weights are on this machine, their sizes come from the files. With
    `stand_in`, the name of another model, the found model keeps its names, and its config and weights are the other
    model's. There is no draft's spec if the engine loads no draft model, or its config is not known here. Raises what
    `find_model` and `model_from_config` raise.
    """
    engine = engine or EngineConfig()
    found = find_model(name, environ=environ)
    if stand_in is not None:
        loaded = find_model(stand_in, environ=environ)
        found = replace(found, config=loaded.config, folder=loaded.folder, engine=loaded.engine)
    draft_config = _draft_config(engine.draft_model, environ) if engine.draft_model else None
    stored = stored_weights(found.folder) if found.folder else None

    engine = engine.completed(found.engine)
    spec = model_from_config(
        with_overrides(found.config, engine.hf_overrides),
        name=found.name,
        dtype=engine.dtype,
        quantization=engine.quantization,
        allow_unknown_keys=allow_unknown_keys,
    )
    spec = replace(spec, engine_options={**found.engine, **spec.engine_options})
    spec, warning = match_checkpoint(spec, stored)
    draft = None
    if draft_config is not None:
        method = str(engine.speculative_method)
        draft = draft_from_config(draft_config, name=str(engine.draft_model), method=method, dtype=engine.dtype)
    return replace(found, warning=warning), spec, draft


def _draft_config(named: str, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the config of a draft model; None if it is not known here. Raises UnknownModelError for a folder that is
    not there."""
    try:
        return find_model(named, environ=environ).config
    except UnknownModelError:
        if named.startswith(("/", ".", "~")):
            raise
        return None


def stored_weights(folder: Path) -> StoredWeights | None:
    """Return what the safetensors files of a folder hold, by their headers, or else by their index. None: neither.

    Raises InvalidRequestError for a file that is not one, and for an index that names files elsewhere.
    """
    index, place = None, folder / SAFETENSORS_INDEX
    if place.is_file():
        with _named(place):
            index = read_index(place)
    files = sorted(folder.glob("*.safetensors"))
    if index is not None:
        names = sorted(set(index["weight_map"].values()))
        if outside := [name for name in names if not is_plain_path(name)]:
            raise InvalidRequestError(
                f"{place} names {outside[0]!r}, which is not below the model's folder: it is damaged."
            )
        files = [folder / name for name in names]
    if files and all(file.is_file() for file in files):
        return StoredWeights(tensors=tuple(tensor for file in files for tensor in _tensors(file)))
    if index is None:
        return None
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return StoredWeights(names=tuple(index["weight_map"]), size_bytes=size if type(size) is int else 0)


def _tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file by its header. Raises InvalidRequestError."""
    with _named(file):
        header, _ = read_header(file)
    found = []
    for name, entry in header.items():
        try:
            (first, last), elements = entry["data_offsets"], math.prod(map(operator.index, entry["shape"]))
            size_bytes = int(last - first)
            found.append(StoredTensor(name=name, dtype=str(entry["dtype"]), elements=elements, size_bytes=size_bytes))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InvalidRequestError(f"{file} is damaged: its header does not say what {name!r} is.") from None
    return found


def _from_folder(path: Path) -> FoundModel:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModelError(f"{path} has no config.json, so it is not a model's folder.")
    folder, config = file.parent.absolute(), _config(partial(_in_folder, file.parent), file.name)
    found = FoundModel(name=str(folder), served_model_names=(folder.name,), config=config, origin=str(file))
    return replace(found, folder=folder, engine=_options(folder))


def _options(folder: Path | None) -> Mapping[str, Any]:
    """Return what vLLM takes from files beside the config: that of Sentence Transformers makes an embedder."""
    return {"runner": "pooling"} if folder is not None and (folder / _EMBEDDERS_FILE).is_file() else {}


def _config(read: Callable[[str], Mapping[str, Any]], file: str = "config.json") -> Mapping[str, Any]:
    """Return a config, joined with ModelOpt's file, which vLLM reads where the config has no quantization."""
    config = read(file)
    return config if "quantization_config" in config else with_quantization_file(config, read(QUANTIZATION_FILE))


def _in_folder(folder: Path, name: str) -> Mapping[str, Any]:
    """Return a JSON file of a folder; {} if it is not there."""
    file = folder / name
    if not file.is_file():
        return {}
    with _named(file, kind=" as JSON"):
        return _object(read_bounded(file, _MAX_CONFIG_BYTES))


def _on_hub(settings: HubSettings, repository: str, name: str) -> Mapping[str, Any]:
    """Return a JSON file of a repository; {} for ModelOpt's if the hub has none or refuses it."""
    not_here = f"{repository} is not in the catalogue or the Hugging Face cache, and "
    if settings.is_offline:
        raise UnknownModelError(f"{not_here}HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps from the hub.")
    response = _get_file(settings, repository, name)
    if response is None:
        raise UnknownModelError(f"{not_here}{settings.endpoint} cannot be reached. {REACH_THE_HUB}")
    if name == QUANTIZATION_FILE and response.status_code in (401, 403, 404):
        return {}
    _check_answer(response, repository, settings)
    with _named(f"{repository}/{name} of {settings.endpoint}", kind=" as JSON"):
        return _object(response.content)


def _object(content: bytes) -> Mapping[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


@contextlib.contextmanager
def _named(file: object, *, kind: str = "") -> Iterator[None]:
    """Raise InvalidRequestError, with the name of a file, where it cannot be read or used."""
    try:
        yield
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidRequestError(f"{file} cannot be read{kind}: {error}.") from error


# -- LoRA adapters

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
