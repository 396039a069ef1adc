"""What a person asked for, as one value. It is checked here for what can be known without a cluster;
whether the model fits is the planner's to say, whether the partition exists is Slurm's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.rendezvous.names import validate_service_name
from hpc_serve.vllm.allowed import check_arguments

Backend = Literal["auto", "ray", "mp"]
Cluster = Literal["slurm", "local"]
EnvironmentKind = Literal["auto", "venv", "conda", "none", "apptainer"]
GpuDirective = Literal["gpus-per-node", "gres"]

_WORDS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "nodelist",
    "exclude",
    "mem",
    "job_name",
    "gres_type",
)
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
_PRINTABLE_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;<>{}!?#]+")  # Slurm's own notation uses & | * ( ) [ ]


def check_directive(name: str, value: str) -> str:
    """Return `value` if it can stand in an `#SBATCH --name=value` line as it is.

    Slurm reads these lines without a shell, so nothing can be quoted in them: a newline would start a line of its
    own, a blank or quote would be read as Slurm likes. Raises InvalidRequestError.
    """
    if not _PRINTABLE_WORD.fullmatch(value):
        raise InvalidRequestError(
            f"{name} is {value!r}: it must be one word without blanks, quotes, newlines "
            r"or any of \ ` $ ; < > { } ! ? #."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """sbatch's own options, under sbatch's own names; None leaves a line out, so that the site's default holds.

    `time` is a Slurm time ("12:00:00", "2-00:00:00", minutes). `mem` is per node in Slurm's notation ("80G", "0" = all
    of the node); `gpu_directive` chooses between `--gpus-per-node=8` and `--gres=gpu:8`, `gres_type` adds the site's
    name of the GPU. `extra` holds further `--name=value` words, one `#SBATCH` line each.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = "12:00:00"
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    mem: str | None = None
    cpus_per_task: int | None = None
    exclusive: bool | None = None
    job_name: str | None = None
    gpu_directive: GpuDirective = "gpus-per-node"
    gres_type: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _WORDS:
            value = getattr(self, name)
            if value is not None:
                check_directive(name.replace("_", "-"), value)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InvalidRequestError(f"time is {self.time!r}: use minutes, HH:MM:SS or D-HH:MM:SS.")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise InvalidRequestError(f"cpus-per-task is {self.cpus_per_task}: it must be at least 1.")
        if self.gpu_directive not in ("gpus-per-node", "gres"):
            raise InvalidRequestError(f"gpu_directive is {self.gpu_directive!r}: use gpus-per-node or gres.")
        for word in self.extra:
            if not re.fullmatch(r"--?[A-Za-z][A-Za-z-]*(=.+)?", word, re.DOTALL):
                raise InvalidRequestError(f"extra sbatch option {word!r}: write it as --name=value or --name.")
            check_directive("extra sbatch option", word)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """How a script gets a Python with hpc-serve and the engine in it.

    `auto`: `$HPC_SERVE_ENV`, else `.venv` in the folder of submission; `venv`: the folder `path`; `conda`: the
    environment `path` (name or folder); `apptainer`: the image `path`, with `binds`; `none`: what modules put on PATH.
    `modules` are loaded first, whatever the kind.
    """

    kind: EnvironmentKind = "auto"
    path: str | None = None
    modules: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "venv", "conda", "none", "apptainer"):
            raise InvalidRequestError(f"environment kind is {self.kind!r}: use auto, venv, conda, none or apptainer.")
        if self.kind in ("venv", "conda", "apptainer") and not self.path:
            raise InvalidRequestError(f"environment kind {self.kind} needs a path (or, for conda, a name).")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What the in-job program is told through its environment; None leaves its default.

    `interface` is the network interface between nodes, `tmpdir` the node-local root of private folders,
    `cache_dir` a node-local folder for compile caches that outlive the job.
    """

    interface: str | None = None
    tmpdir: str | None = None
    cache_dir: str | None = None

    def exports(self) -> dict[str, str]:
        """Environment variables to set in the script, by name."""
        named = {
            "HPC_SERVE_INTERFACE": self.interface,
            "HPC_SERVE_TMPDIR": self.tmpdir,
            "HPC_SERVE_CACHE_DIR": self.cache_dir,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """One service as asked for. None means: the planner, or the site, decides.

    `gpu` names what the nodes have, as in plan/machines.py: a GPU, a TPU slice, the sockets of a CPU node;
    `gpu_memory_bytes` is the memory of one of them, where that is no fact of the product (CPUs) or another one.
    `engine_args` are further words for `vllm serve`, put last, so that they win; options that the pinned
    vLLM does not know are refused unless `allow_unknown_vllm_options`. `log_dir` is absolute, or None for the
    service's own folder. `templates_dir` is looked in before our own templates.
    """

    model: str
    service: str
    gpu: str = DEFAULT_GPU
    gpu_memory_bytes: int | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_model_len: int | None = None
    backend: Backend = "auto"
    cluster: Cluster = "slurm"
    engine_args: tuple[str, ...] = ()
    allow_unknown_vllm_options: bool = False
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    environment: Environment = field(default_factory=Environment)
    settings: JobSettings = field(default_factory=JobSettings)
    log_dir: str | None = None
    templates_dir: str | None = None

    def __post_init__(self) -> None:
        validate_service_name(self.service)
        for name in ("num_nodes", "gpus_per_node", "tensor_parallel_size", "pipeline_parallel_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = name.removeprefix("num_").replace("_", "-")
                raise InvalidRequestError(f"{option} is {value}: it must be at least 1.")
        if self.backend not in ("auto", "ray", "mp"):
            raise InvalidRequestError(f"backend is {self.backend!r}: use auto, ray or mp.")
        if self.cluster not in ("slurm", "local"):
            raise InvalidRequestError(f"cluster is {self.cluster!r}: use slurm or local.")
        if self.cluster == "local" and (self.num_nodes or 1) > 1:
            raise InvalidRequestError(
                f"--cluster local runs on this machine alone, but {self.num_nodes} nodes were asked for; "
                "leave --nodes out, or use --cluster slurm."
            )
        check_arguments(self.engine_args, allow_unknown=self.allow_unknown_vllm_options)
        if self.log_dir is not None:
            if not self.log_dir.startswith("/"):
                raise InvalidRequestError(f"log-dir is {self.log_dir!r}: it must be an absolute path.")
            check_directive("log-dir", self.log_dir)
