"""The site's own models: names for folders and repositories, with the options that they want, beside the catalogue.

They are a list in a YAML file that the site file names (`models`). The parts of a model are read from its folder or
from the hub, as for every other model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.printable import printable
from hpc_serve.submit.request.job_env import check_env
from hpc_serve.submit.site.yaml_files import read_yaml
from hpc_serve.vllm.arguments import names_in, without


@dataclass(frozen=True, kw_only=True)
class SiteModel:
    """One of them: `model` is a folder, a repository or a name of the catalogue, `vllm_args` are for `vllm serve`.

    `env` are variables of its jobs.
    """

    name: str
    model: str
    vllm_args: tuple[str, ...] = ()
    note: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def engine_args(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """Return the model's options without those that `given` repeats, then `given`."""
        return (*without(self.vllm_args, names_in(given)), *given)


def load_site_models(path: str | None) -> Mapping[str, SiteModel]:
    """Return the models in the file, by their names in small letters. Raises SiteFileError, naming file and entry."""
    if path is None:
        return {}
    try:
        document = read_yaml(Path(path)) or []
    except (OSError, ValueError) as error:
        raise SiteFileError(f"models file {path} cannot be read: {error}") from error
    if not isinstance(document, list):
        raise SiteFileError(f"models file {path} must be a list of entries, each with a name and a model.")
    found: dict[str, SiteModel] = {}
    for number, entry in enumerate(document, 1):
        model = _model(entry, f"models file {path}, entry {number}")
        if model.name.lower() in found:
            raise SiteFileError(f"models file {path}: {model.name} is there twice; keep one of the two.")
        found[model.name.lower()] = model
    return found


def _model(entry: Any, where: str) -> SiteModel:
    if not isinstance(entry, dict):
        raise SiteFileError(f"{where}: it must have a name and a model.")
    known = [one.name for one in fields(SiteModel)]
    for key in entry:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            raise SiteFileError(f"{where}: unknown key {key!r}.{guess} The keys are: {', '.join(known)}.")
    texts = {key: entry[key] for key in ("name", "model", "note") if entry.get(key) is not None}
    for key in ("name", "model"):
        if not isinstance(texts.get(key), str) or not texts[key].strip():
            raise SiteFileError(f"{where}: {key} must be a text.")
    for key, text in texts.items():
        if isinstance(text, dict | list):  # before it is a text: aliases make short YAML long
            raise SiteFileError(f"{where}: {key} must be a text.")
        if printable(str(text)) != str(text):  # a terminal would act on it
            raise SiteFileError(f"{where}: {key} is {text!r}: it must be of printable characters.")
    words = entry.get("vllm_args") or []
    if not isinstance(words, list) or any(isinstance(word, (dict, list)) for word in words):
        raise SiteFileError(f"{where}: vllm_args must be a list of words, as [--max-num-seqs, 64].")
    env = entry.get("env") or {}
    if not isinstance(env, dict) or any(isinstance(value, (dict, list, bool)) for value in env.values()):
        raise SiteFileError(f"{where}: env must hold variables, as {{NAME: value}}; write yes, no, true as 'true'.")
    env = {str(name): str(value) for name, value in env.items()}
    try:
        check_env(env)
    except InvalidRequestError as error:
        raise SiteFileError(f"{where}: {error}") from error
    return SiteModel(**texts | {"note": str(texts.get("note", ""))}, vllm_args=tuple(map(str, words)), env=env)
