"""The site file: what one cluster needs of every request (partition, account, modules, container, network).

It is a small YAML file of flat settings. They are defaults: options and HPC_SERVE_… variables win over them. An unknown
setting is refused, so that a misspelt one is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.plan.hardware.cluster import cluster_named
from hpc_serve.rendezvous.ownership import check_chosen
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.sizes import parse_size
from hpc_serve.submit.request.bounds import is_machine_name
from hpc_serve.submit.request.environment import CONTAINERS, Environment, EnvironmentKind, JobSettings, variable_of
from hpc_serve.submit.request.job_env import check_env
from hpc_serve.submit.request.sbatch_options import SbatchOptions, SlurmOptions
from hpc_serve.submit.site.yaml_files import fields_of, read_yaml

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


def load_site(path: Path) -> SiteProfile:
    """Read one site file. Raises SiteFileError, naming file, line and setting."""
    return SiteProfile(**read_settings(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a site file, by name, checked. Raises SiteFileError, naming file, line and setting."""
    try:
        document = read_yaml(path)
    except (OSError, ValueError) as error:
        raise SiteFileError(f"site file {path} cannot be read, or is not YAML: {error}") from error
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
        raise SiteFileError(f"site file {path} sets {' and '.join(named)}: one of them says where Python is.")
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
