"""The site file: what one cluster needs of every request (partition, account, modules, container, network).

It is a small YAML file of flat settings. They are defaults: options and HPC_SERVE_… variables win over them. An unknown
setting is refused, so that a misspelt one is noticed.

YAML files of people and sites are bounded in size and in depth, and are read as the fields of a dataclass. Values are
taken as they are written: YAML would read the time 24:00:00 as the number 86400 and the account 0123 as 83.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.given_files import read_bounded
from hpc_serve.plan.hardware import cluster_named
from hpc_serve.rendezvous.ownership import check_chosen
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.submit.request.bounds import is_machine_name
from hpc_serve.submit.request.options import (
    CONTAINERS,
    Environment,
    EnvironmentKind,
    JobSettings,
    SbatchOptions,
    SlurmOptions,
    check_env,
    variable_of,
)
from hpc_serve.units import parse_size

if TYPE_CHECKING:
    import yaml

# -- YAML files

_MOST_BYTES = 128 * 1024
_MOST_LEVELS = 20
_NOTHING = "tag:yaml.org,2002:null"
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


def _read_yaml(path: Path) -> yaml.Node | None:
    """Return what a YAML file holds; None for an empty file. Raises OSError and ValueError."""
    import yaml  # not at the top: most commands find no site file, and it takes a twentieth of `plan`

    class BoundedLoader(yaml.SafeLoader):
        """Counts levels while it reads: PyYAML takes seconds for a file of brackets."""

        levels = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            self.levels += 1
            if self.levels > _MOST_LEVELS:
                raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
            node = super().compose_node(parent, index)
            self.levels -= 1
            return node

    text = read_bounded(path, _MOST_BYTES).decode()
    try:
        return yaml.compose(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_site_yaml(path: Path, called: str) -> yaml.Node | None:
    """Return what a YAML file of a site holds; None for an empty file. Raises SiteFileError."""
    try:
        return _read_yaml(path)
    except OSError as error:
        raise SiteFileError(f"{called} {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise SiteFileError(f"{called} {path} is not YAML: {error}") from error


def place_of(node: yaml.Node, path: Path) -> str:
    """Return where a value stands, for a person."""
    return f"{path}:{node.start_mark.line + 1}"


def fields_of(node: yaml.Node, kind: type, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a mapping by name, with the types that the fields of `kind` have.

    Raises SiteFileError, naming file, line and setting.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise SiteFileError(f"{place_of(node, path)} must hold settings, one `name: value` a line.")
    kinds = get_type_hints(kind)
    seen: set[str] = set()
    for key, value in node.value:
        name, where = str(key.value), place_of(key, path)
        if name not in kinds:
            close = difflib.get_close_matches(name.replace("-", "_"), kinds, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            raise SiteFileError(f"{where}: unknown setting {name!r}.{guess} The settings are: {', '.join(kinds)}.")
        if name in seen:
            raise SiteFileError(f"{where}: {name} is set twice; keep one of the two.")
        seen.add(name)
        if kinds[name] == Mapping[str, Mapping[str, Any]]:  # by name, each with settings as this one has
            pairs = _pairs(value, f"{where}: {name}")
            yield name, {str(one.value): dict(fields_of(its, kind, path)) for one, its in pairs}
        else:
            yield name, _value(value, kinds[name], f"{where}: {name}")


def _pairs(node: yaml.Node, where: str) -> list[tuple[yaml.Node, yaml.Node]]:
    import yaml

    if node.tag == _NOTHING:
        return []
    names = [str(one.value) for one, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if not names or len(set(names)) < len(names):
        raise SiteFileError(f"{where} must have names, each once and with settings: NAME: {{gpu: …}}.")
    for one, its in node.value:
        if not isinstance(its, yaml.MappingNode):
            gpu = its.value if isinstance(its, yaml.ScalarNode) and its.value else "…"
            raise SiteFileError(f"{where}: {one.value} must have settings: write {{{one.value}: {{gpu: {gpu}}}}}.")
    return list(node.value)


def _value(node: yaml.Node, kind: Any, where: str) -> Any:
    import yaml

    if kind == tuple[str, ...]:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if all(isinstance(item, yaml.ScalarNode) for item in items):
            return tuple(str(item.value) for item in items if item.value)
        raise SiteFileError(f"{where} must be a list of words, as [one, two].")
    if kind == Mapping[str, str]:
        if node.tag == _NOTHING:
            return {}
        if isinstance(node, yaml.MappingNode) and all(isinstance(one, yaml.ScalarNode) for one in chain(*node.value)):
            found = {str(name.value): str(value.value) for name, value in node.value}
            if len(found) < len(node.value):
                raise SiteFileError(f"{where} has a name twice; keep one of the two.")
            return found
        raise SiteFileError(f"{where} must hold variables, as {{NAME: value}}.")
    if not isinstance(node, yaml.ScalarNode):
        raise SiteFileError(f"{where} must be one value, not a list or a mapping.")
    text = str(node.value)
    if node.tag == _NOTHING:
        return None
    if kind == int | None:
        if not re.fullmatch(r"\d{1,9}", text):
            raise SiteFileError(f"{where} is {text!r}: it must be a whole number.")
        return int(text)
    if kind == bool | None:
        if text.lower() not in (*_YES, *_NO):
            raise SiteFileError(f"{where} is {text!r}: it must be true or false.")
        return text.lower() in _YES
    return text


# -- the site file

PYTHONS: Mapping[str, EnvironmentKind] = {
    "venv": "venv",
    "conda": "conda",
    **{kind.replace("-", "_"): kind for kind in CONTAINERS},
}
"""The settings of which one says where Python is, and what each makes of the environment."""

_OF_ITS_GPU = ("gpu", "gpu_memory", "gpus_per_node", "gres_type")
_PATHS = ("venv", "apptainer", "charliecloud", "log_dir", "templates_dir", "models")


def _setting(help: str, default: Any = None) -> Any:
    """Return a setting, with what its guide says of it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class SiteProfile(SbatchOptions):
    """The settings of a site file, all optional: sbatch's options (SbatchOptions), and those below.

    At most one of the settings for the place of Python (PYTHONS) is set.
    """

    env: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Variables of every job, `{HF_HOME: $SCRATCH/hf}`; `$NAME` is of whoever submits."},
    )
    sbatch_extra: tuple[str, ...] = _setting("Further options of sbatch, as `--name=value` words.", ())
    gpu: str | None = _setting("Accelerator of the nodes, as `hpc-serve gpus` lists it.")
    gpu_memory: str | None = _setting("Memory of one (`256GiB`), where the driver shows another; CPU sockets need it.")
    gpus_per_node: int | None = _setting("How many a node has.")
    venv: str | None = _setting("The virtual environment that scripts activate, a folder.")
    conda: str | None = _setting("The conda environment in its place, a name or a folder.")
    apptainer: str | None = _setting("The image in its place, for Apptainer: a file or a URI.")
    pyxis: str | None = _setting("The image, for Pyxis and Enroot: a .sqsh file or a registry's name.")
    podman_hpc: str | None = _setting("The image, for podman-hpc, by name.")
    charliecloud: str | None = _setting("The image, for Charliecloud: a folder or a .sqfs file.")
    binds: tuple[str, ...] = _setting("Folders that the image sees, `/scratch` or `/host:/there`.", ())
    container_options: tuple[str, ...] = _setting("Further words for the container's runtime.", ())
    modules: tuple[str, ...] = _setting("Modules that are loaded first.", ())
    interface: str | None = _setting("Network interface between nodes, if the host names resolve to another.")
    tmpdir: str | None = _setting("Node-local folder for private folders of jobs (`/tmp`).")
    cache_dir: str | None = _setting("Node-local folder for compile caches that outlive a job.")
    cache_size: str | None = _setting("Size of those caches on a node, at most (`10GiB`); `0` keeps nothing.")
    stage: str | None = _setting("Nodes copy the model first: `on`, or a node-local folder, as `/dev/shm`.")
    memory_folders: tuple[str, ...] = _setting(
        "Folders of nodes that are memory (tmpfs), beside `/dev/shm`: jobs pay for what they keep there.", ()
    )
    log_dir: str | None = _setting("Folder of the logs, if not the service's folder.")
    templates_dir: str | None = _setting("Folder of the site's own script templates.")
    offline_nodes: bool | None = _setting("Jobs cannot reach the hub: weights must be there before `submit`.")
    weights_help: str | None = _setting("How people get weights here; `submit` says it where they are missing.")
    jobs_can_submit: bool | None = _setting("Whether jobs may call `sbatch` (`true`); if not, use `--chain`.")
    models: str | None = _setting("File of the site's own models (below).")
    machines: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={"help": "Other kinds of machine by name, each with its own settings: `{a100: {gpu: a100-80gb}}`."},
    )

    def of_machine(self, name: str) -> SiteProfile:
        """Return the settings for one kind of machine: its own, then the site's, but for the site's GPU.

        Raises InvalidRequestError for a kind without settings.
        """
        if name == DEFAULT_MACHINE:
            return self
        if name not in self.machines:
            known = ", ".join((DEFAULT_MACHINE, *self.machines))
            raise InvalidRequestError(
                f"The site file has no machine {name!r}; it has {known}. Add one: "
                f"machines: {{{name}: {{gpu: …, partition: …}}}}; `hpc-serve site` shows what holds."
            )
        own = dict(self.machines[name])
        cleared: dict[str, Any] = dict.fromkeys(_OF_ITS_GPU)
        if any(own.get(python) for python in PYTHONS):
            cleared |= dict.fromkeys(PYTHONS)
        env = {**self.env, **own.pop("env", {})}
        return replace(self, **{**cleared, **own, "env": env, "machines": {}})

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`gpu_memory` in bytes. Raises InvalidRequestError."""
        return parse_size(self.gpu_memory) if self.gpu_memory else None

    def slurm_options(self, **asked: Any) -> SlurmOptions:
        """sbatch's options: what was asked for (None: nothing), else the site's. Raises InvalidRequestError."""
        site = {option.name: getattr(self, option.name) for option in fields(SbatchOptions)}
        site["extra"] = self.sbatch_extra
        return SlurmOptions(**(_given(site) | _given(asked)))

    def environment(self, environ: Mapping[str, str]) -> Environment:
        """Return the place of Python for the script; HPC_SERVE_ENV, if set, wins over the site's. Raises
        InvalidRequestError."""
        if not environ.get("HPC_SERVE_ENV"):
            for name, kind in PYTHONS.items():
                if path := getattr(self, name):
                    return Environment(
                        kind=kind,
                        path=path,
                        modules=self.modules,
                        binds=self.binds,
                        container_options=self.container_options,
                    )
        return Environment(modules=self.modules)

    def job_settings(self, environ: Mapping[str, str]) -> JobSettings:
        """Return the settings of the job; a HPC_SERVE_… variable, if set, wins over the site's."""
        names = [setting.name for setting in fields(JobSettings)]
        return JobSettings(**{name: environ.get(variable_of(name)) or getattr(self, name) for name in names})


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a site file, by name, checked. Raises SiteFileError, naming file, line and setting."""
    document = read_site_yaml(path, "site file")
    settings = dict(fields_of(document, SiteProfile, path)) if document is not None else {}
    for some in (settings, *settings.get("machines", {}).values()):
        some |= {name: os.path.expanduser(some[name]) for name in _PATHS if some.get(name)}
    try:
        _check(SiteProfile(**settings), path)
    except InvalidRequestError:
        raise
    except (OSError, ValueError, ArithmeticError, RecursionError) as error:  # a name too long, a number too large
        raise SiteFileError(f"site file {path} holds a value that cannot be used: {error}") from error
    return settings


def _check(profile: SiteProfile, path: Path | str) -> None:
    for name, own in profile.machines.items():
        if name == DEFAULT_MACHINE or not is_machine_name(name):
            raise SiteFileError(
                f"site file {path}: machines: {name!r} is no name: take a letter, then letters, digits, . _ -, and not "
                f"{DEFAULT_MACHINE}, which is the site itself."
            )
        if "machines" in own or not own.get("gpu"):
            wrong = "has machines of its own" if "machines" in own else "says no gpu; `hpc-serve gpus` lists them"
            raise SiteFileError(f"site file {path}: machines: {name} {wrong}.")
        _check(replace(SiteProfile(), **own), f"{path}: machines: {name}")
    named = [kind for kind in PYTHONS if getattr(profile, kind)]
    if len(named) > 1:
        raise SiteFileError(f"site file {path} sets {' and '.join(named)}; each says where Python is: keep one.")
    if profile.templates_dir and not Path(profile.templates_dir).is_dir():
        raise SiteFileError(f"site file {path}: templates_dir {profile.templates_dir} is not a folder.")
    for name in ("templates_dir", "models"):
        if named := getattr(profile, name):
            check_chosen(Path(named), called=f"site file {path}: {name}")
    try:
        if profile.gpu:
            cluster_named(profile.gpu, total_bytes=1)
        profile.slurm_options()
        _ = profile.gpu_memory_bytes
        if profile.cache_size not in (None, "0"):
            parse_size(profile.cache_size)
        check_env(profile.env)
    except InvalidRequestError as error:
        raise SiteFileError(f"site file {path}: {error}") from error


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ()}
