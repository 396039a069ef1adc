"""Finds a model's config: in the catalogue, in a folder or a file, in the local Hugging Face cache, or on the hub.

plan/model/ decides what a config means. For local weights, this module reads only the headers of their files.

The hub is asked last, and only for names of the form owner/name. A token goes into its header and nowhere else.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError, UnknownModelError
from hpc_serve.given_files import parse_json, read_bounded
from hpc_serve.hub.hub_requests import MAX_CONFIG_BYTES, check_answer, get_file
from hpc_serve.hub.hub_settings import read_hub_settings
from hpc_serve.hub.local_weights import cached_folder, read_header, read_index
from hpc_serve.hub.needed_files import SAFETENSORS_INDEX, is_plain_path
from hpc_serve.plan import ModelSpec, catalog, model_from_config
from hpc_serve.plan.model.architectures import with_overrides
from hpc_serve.plan.model.checkpoint import StoredTensor, holds_what_is_loaded, loaded_bytes, match_checkpoint
from hpc_serve.plan.model.quantization import QUANTIZATION_FILE, with_quantization_file

if TYPE_CHECKING:
    import httpx

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's config and where it is from.

    `name` is what `vllm serve` takes (repository or folder), `served_model_names` are that and the alias asked for,
    `origin` says where the config was found, `folder` is where weights may lie. `note` is the catalogue's; `warning`
    says that config and files do not agree.
    """

    name: str
    served_model_names: tuple[str, ...]
    config: Mapping[str, Any]
    origin: str = "the catalogue"
    note: str | None = None
    warning: str | None = None
    folder: Path | None = None


def find_model(
    name: str, *, environ: Mapping[str, str] | None = None, transport: httpx.BaseTransport | None = None
) -> FoundModel:
    """Return the config of a catalogue alias, a repository, a folder, or a path to a config.json.

    Raises UnknownModelError where there is none (or it may not be seen), InvalidRequestError where it cannot be read.
    `transport` stands in for the network in tests.
    """
    environ = os.environ if environ is None else environ
    path = Path(name).expanduser()
    looks_like_a_path = name.startswith(("/", ".", "~")) or name.endswith(".json")
    entry = None if looks_like_a_path else catalog.find(name)
    if entry is not None:
        names = (entry.name,) if name.lower() == entry.name.lower() else (entry.name, name.lower())
        cached = cached_folder(entry.name, environ)
        return FoundModel(
            name=entry.name, served_model_names=names, config=entry.config, note=entry.note, folder=cached
        )
    if path.is_dir() or path.is_file():
        return _with_quantization(_from_folder(path))
    if looks_like_a_path:
        raise UnknownModelError(f"There is no folder or file {name!r}, so no model can be read from it.")
    if not _REPOSITORY.fullmatch(name):
        raise UnknownModelError(f"No model is known as {name!r}.{catalog.did_you_mean(name)}")
    cached = cached_folder(name, environ)
    if cached is not None:
        config = _read_config(cached / "config.json")
        return _with_quantization(
            FoundModel(
                name=name, served_model_names=(name,), config=config, origin="the Hugging Face cache", folder=cached
            )
        )
    config = _from_hub(name, "config.json", environ, transport)
    if "quantization_config" not in config:
        beside = _from_hub(name, QUANTIZATION_FILE, environ, transport, optional=True)
        config = with_quantization_file(config, beside)
    return FoundModel(name=name, served_model_names=(name,), config=config, origin="the hub")


def _with_quantization(found: FoundModel) -> FoundModel:
    """Add ModelOpt's file beside the config to the model. vLLM reads the file where the config has no quantization."""
    file = found.folder / QUANTIZATION_FILE if found.folder else None
    if file is None or "quantization_config" in found.config or not file.is_file():
        return found
    return replace(found, config=with_quantization_file(found.config, _read_config(file)))


def find_spec(
    name: str,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    stand_in: str | None = None,
    allow_unknown_keys: bool = False,
    environ: Mapping[str, str] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> tuple[FoundModel, ModelSpec]:
    """Return a model and its spec. If its weights are on this machine, their sizes come from the files.

    With `stand_in`, the name of another model, the found model keeps its names, and its config and weights are the
    other model's. `hf_overrides` change its config, as vLLM's option does. Raises what `find_model` and
    `model_from_config` raise.
    """
    found = find_model(name, environ=environ, transport=transport)
    if stand_in is not None:
        loaded = find_model(stand_in, environ=environ, transport=transport)
        found = replace(found, config=loaded.config, folder=loaded.folder)
    spec = model_from_config(
        with_overrides(found.config, hf_overrides),
        name=found.name,
        dtype=dtype,
        quantization=quantization,
        allow_unknown_keys=allow_unknown_keys,
    )
    if found.folder is None or spec.quantization.is_assumed:
        return found, spec
    tensors = stored_tensors(found.folder)
    stored = _indexed_bytes(found.folder, spec) if tensors is None else loaded_bytes(tensors, spec)
    if stored is None:
        return found, spec
    spec, sentence = match_checkpoint(spec, stored)
    return replace(found, warning=sentence), spec


def stored_tensors(folder: Path) -> list[StoredTensor] | None:
    """Return the tensors of a folder's safetensors files.

    None if there are none, or if a file of the index is missing.

    Reads each file's header only. Raises InvalidRequestError for a file that is not one.
    """
    index, files = _index(folder), sorted(folder.glob("*.safetensors"))
    if index is not None:
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    if not files or not all(file.is_file() for file in files):
        return None
    found = []
    for file in files:
        with _named(file):
            header, _ = read_header(file)
        found += [_stored(file, name, entry) for name, entry in header.items() if name != "__metadata__"]
    return found


def _index(folder: Path) -> Mapping[str, Any] | None:
    """Return the index of a folder's weights; None if there is none."""
    file = folder / SAFETENSORS_INDEX
    if not file.is_file():
        return None
    with _named(file):
        index = read_index(file)
    if outside := [name for name in index["weight_map"].values() if not is_plain_path(name)]:
        raise InvalidRequestError(f"{file} names {outside[0]!r}, which is not below the model's folder: it is damaged.")
    return index


def _indexed_bytes(folder: Path, spec: ModelSpec) -> int | None:
    """Return the total size by the index; None without a usable size, or if vLLM loads other tensors."""
    index = _index(folder) or {}
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(size) is not int or size <= 0:
        return None
    return size if holds_what_is_loaded(index["weight_map"], spec) else None


def _stored(file: Path, name: str, entry: Any) -> StoredTensor:
    try:
        first, last = entry["data_offsets"]
        return StoredTensor(
            name=name, dtype=str(entry["dtype"]), elements=math.prod(entry["shape"]), size_bytes=int(last - first)
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidRequestError(f"{file} is damaged: its header does not say what {name!r} is.") from None


def _from_folder(path: Path) -> FoundModel:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UnknownModelError(f"{path} has no config.json, so it is not a model's folder.")
    folder = file.parent.absolute()
    return FoundModel(
        name=str(folder), served_model_names=(folder.name,), config=_read_config(file), origin=str(file), folder=folder
    )


def _from_hub(
    repository: str,
    file: str,
    environ: Mapping[str, str],
    transport: httpx.BaseTransport | None,
    *,
    optional: bool = False,
) -> Mapping[str, Any]:
    """Return a JSON file of a repository. With `optional`, return {} if the hub has no such file or refuses it."""
    settings = read_hub_settings(environ)
    if settings.is_offline:
        raise UnknownModelError(
            f"{repository} is not in the catalogue or the Hugging Face cache, and HF_HUB_OFFLINE or "
            "TRANSFORMERS_OFFLINE keeps from the hub."
            f"{catalog.did_you_mean(repository)}"
        )
    response = get_file(settings, repository, file, transport)
    if response is None:
        raise UnknownModelError(
            f"{repository} is not in the catalogue or the Hugging Face cache, and {settings.endpoint} cannot be reached"
            f": name a folder or a config.json instead.{catalog.did_you_mean(repository)}"
        )
    if optional and response.status_code in (401, 403, 404):
        return {}
    check_answer(response, repository, settings, hint=catalog.did_you_mean(repository))
    with _named(f"{repository}/{file} of {settings.endpoint}", kind=" as JSON"):
        return _object(response.content)


def _read_config(file: Path) -> Mapping[str, Any]:
    with _named(file, kind=" as JSON"):
        return _object(read_bounded(file, MAX_CONFIG_BYTES))


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
