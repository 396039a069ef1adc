"""Finds and merges the site files, and reads the list of the site's own models.

The system's file is read first, then the user's. Each setting of the user's file wins. site.py decides what one file
may say. The site's own models are names for folders and repositories, with the options that they want, beside the
catalogue. They are a list in a YAML file that the site file names (`models`). The parts of a model are read from its
folder or from the hub, as for every other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.printable import printable
from hpc_serve.rendezvous.ownership import check_chosen, fault
from hpc_serve.submit.request.options import check_env
from hpc_serve.submit.site.site import PYTHONS, SiteProfile, fields_of, place_of, read_settings, read_site_yaml
from hpc_serve.vllm.arguments import names_in, without

if TYPE_CHECKING:
    import yaml

# -- the site's models


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
    document = read_site_yaml(Path(path), "models file")
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


# -- the site files

SYSTEM_FILE = "/etc/hpc-serve/site.yaml"


@dataclass(frozen=True, kw_only=True)
class MergedSite:
    """The merged settings; `files` in the order of reading; `sources` has the file of each setting in force."""

    profile: SiteProfile
    files: tuple[Path, ...]
    sources: Mapping[str, Path]

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings in force, by name."""
        return {name: getattr(self.profile, name) for name in self.sources}


def read_site(environ: Mapping[str, str], named: str | None = None) -> SiteProfile:
    """Return the merged settings of the site files. `named` is the user's file (`--site`). Raises SiteFileError."""
    return merge_site(environ, named).profile


def merge_site(environ: Mapping[str, str], named: str | None = None) -> MergedSite:
    """Return the merged settings, with the file of each setting. Raises SiteFileError."""
    files = tuple(dict.fromkeys(one for one in (find_system_file(environ), find_user_file(environ, named)) if one))
    settings: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    for file in files:
        own = read_settings(file)
        if any(own.get(name) for name in PYTHONS):  # one of them replaces the other kinds too
            for name in PYTHONS:
                settings.pop(name, None)
        for name in ("env", "machines"):  # merged by their own names
            if own.get(name):
                own[name] = {**settings.get(name, {}), **own[name]}
        settings |= own
        sources |= dict.fromkeys(own, file)
    in_force = {name: value for name, value in settings.items() if value not in (None, (), {})}
    return MergedSite(profile=SiteProfile(**settings), files=files, sources={name: sources[name] for name in in_force})


def find_system_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file named by HPC_SERVE_SYSTEM_SITE (empty: none), else `/etc/hpc-serve/site.yaml` if there is one.

    Its words decide what runs as the user, who did not name it. Raises SiteFileError if others can change it.
    """
    named = environ.get("HPC_SERVE_SYSTEM_SITE")
    if named == "" or (named is None and not Path(SYSTEM_FILE).exists()):
        return None
    path = Path(named or SYSTEM_FILE)
    if reason := fault(path, "read"):
        raise SiteFileError(
            f"the system's site file {path} is not used: {reason}. Its words decide what runs as you: have it made "
            "root's or yours, and writable to nobody else; or set HPC_SERVE_SYSTEM_SITE= (empty) to go without it."
        )
    return path


def find_user_file(environ: Mapping[str, str], named: str | None = None) -> Path | None:
    """Find the user's file: the named one, or the default one if it exists. Raises SiteFileError if everybody can
    change it."""
    path = user_file(environ, named)
    if not (named or environ.get("HPC_SERVE_SITE") or path.exists()):
        return None
    check_chosen(path, called=f"the site file {path}")
    return path


def user_file(environ: Mapping[str, str], named: str | None = None) -> Path:
    """Return the file named by `--site`, else by HPC_SERVE_SITE, else `~/.config/hpc-serve/site.yaml`."""
    if chosen := named or environ.get("HPC_SERVE_SITE"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "hpc-serve" / "site.yaml"
