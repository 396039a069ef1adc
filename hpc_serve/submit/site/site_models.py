"""The site's own models: names for folders and repositories, with the options that they want, beside the catalogue.

They are a list in a YAML file that the site file names (`models`). The parts of a model are read from its folder or
from the hub, as for every other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.printable import printable
from hpc_serve.submit.request.job_env import check_env
from hpc_serve.submit.site.yaml_files import fields_of, place_of, read_yaml
from hpc_serve.vllm.arguments import names_in, without

if TYPE_CHECKING:
    import yaml


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
    """Return the models in the file, by their names in small letters. Raises SiteFileError, naming file and line."""
    if path is None:
        return {}
    try:
        document = read_yaml(Path(path))
    except (OSError, ValueError) as error:
        raise SiteFileError(f"models file {path} cannot be read: {error}") from error
    if document is None:
        return {}
    import yaml

    if not isinstance(document, yaml.SequenceNode):
        raise SiteFileError(f"models file {path} must be a list of entries, each with a name and a model.")
    found: dict[str, SiteModel] = {}
    for node in document.value:
        model, where = _model(node, Path(path)), place_of(node, Path(path))
        if model.name.lower() in found:
            raise SiteFileError(f"{where}: {model.name} is there twice; keep one of the two.")
        found[model.name.lower()] = model
    return found


def _model(node: yaml.Node, path: Path) -> SiteModel:
    values = {name: value for name, value in fields_of(node, SiteModel, path) if value is not None}
    where = place_of(node, path)
    for key in ("name", "model"):
        if not values.get(key, "").strip():
            raise SiteFileError(f"{where}: {key} must be a text.")
    for key in ("name", "model", "note"):
        if printable(text := values.get(key, "")) != text:  # a terminal would act on it
            raise SiteFileError(f"{where}: {key} is {text!r}: it must be of printable characters.")
    try:
        check_env(values.get("env", {}))
    except InvalidRequestError as error:
        raise SiteFileError(f"{where}: {error}") from error
    return SiteModel(**values)
