"""The place of Python and the engine for a script, and the settings of the program in the job. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.request.sbatch_options import check_choice

EnvironmentKind = Literal["auto", "venv", "conda", "none", "apptainer", "pyxis", "podman-hpc", "charliecloud"]
CONTAINERS: tuple[EnvironmentKind, ...] = ("apptainer", "pyxis", "podman-hpc", "charliecloud")
"""The kinds that are an image."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How a script gets a Python with hpc-serve and the engine in it.

    `auto`: `$HPC_SERVE_ENV`, else `.venv` in the folder of submission; `venv`: the folder `path`; `conda`: the
    environment `path` (name or folder); one of CONTAINERS: the image `path` under that runtime, which sees `binds` and
    takes further `container_options`; `none`: what modules put on PATH. `modules` are loaded first, whatever the kind.
    """

    kind: EnvironmentKind = "auto"
    path: str | None = None
    modules: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    container_options: tuple[str, ...] = ()

    @property
    def is_container(self) -> bool:
        return self.kind in CONTAINERS

    def __post_init__(self) -> None:
        check_choice("environment kind", self.kind, EnvironmentKind)
        if self.kind not in ("auto", "none") and not self.path:
            raise InvalidRequestError(f"environment kind {self.kind} needs a path (or, for conda, a name).")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings that the in-job program finds in its environment; None leaves its default.

    `interface` is the network interface between nodes, `tmpdir` the node-local root of private folders, `cache_dir` a
    node-local folder for compile caches that outlive the job; they may take `cache_size`. `stage`: the engine loads a
    copy of the model on its node, below `tmpdir` ("on") or in the folder that it names.
    """

    interface: str | None = None
    tmpdir: str | None = None
    cache_dir: str | None = None
    cache_size: str | None = None
    stage: str | None = None

    def exports(self) -> dict[str, str]:
        """Environment variables to set in the script, by name."""
        named = {variable_of(setting.name): getattr(self, setting.name) for setting in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def variable_of(setting: str) -> str:
    """Return the environment variable of one of the JobSettings.

    >>> variable_of("tmpdir")
    'HPC_SERVE_TMPDIR'
    """
    return f"HPC_SERVE_{setting.upper()}"
