"""What a person asked for, as one value, checked as far as that is possible without a cluster.

Whether the model fits is decided by the planner, whether the partition exists by Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import LONGEST_THAT_FITS, Arrivals
from hpc_serve.plan.hardware.cluster import DEFAULT_GPU
from hpc_serve.rendezvous.names import expanded_log_dir, validate_service_name
from hpc_serve.submit.request.bounds import check_elastic, check_jobs_can_submit
from hpc_serve.submit.request.chain import check_chain
from hpc_serve.submit.request.job_env import check_env
from hpc_serve.submit.request.replicas import check_replicas, check_shared_job
from hpc_serve.submit.request.sbatch_options import SlurmOptions, check_choice, check_directive
from hpc_serve.vllm.allowed import check_arguments
from hpc_serve.vllm.arguments import read_arguments, value_of

Backend = Literal["auto", "ray", "mp"]
Cluster = Literal["slurm", "local"]
EnvironmentKind = Literal["auto", "venv", "conda", "none", "apptainer", "pyxis", "podman-hpc", "charliecloud"]
CONTAINERS: tuple[EnvironmentKind, ...] = ("apptainer", "pyxis", "podman-hpc", "charliecloud")
"""The kinds that are an image."""

_COUNTS = (
    *("replicas", "replicas_per_job", "chain", "num_nodes", "gpus_per_node"),
    *("tensor_parallel_size", "pipeline_parallel_size", "max_model_len"),
    *("concurrency", "input_tokens", "output_tokens", "longest_output_tokens"),
)


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

    `interface` is the network interface between nodes, `tmpdir` the node-local root of private folders,
    `cache_dir` a node-local folder for compile caches that outlive the job, which may take `cache_size`. `stage`: the
    engine loads a copy of the model on its node, below `tmpdir` ("on") or in the folder that it names.
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
    """The environment variable of one of the JobSettings.

    >>> variable_of("tmpdir")
    'HPC_SERVE_TMPDIR'
    """
    return f"HPC_SERVE_{setting.upper()}"


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """One service as asked for. None means: the planner, or the site, decides.

    `replicas` are dealt to jobs, tasks of one array; the `replicas_per_job` replicas of a job divide its node. The jobs
    decide how many replicas there are, up to `max_replicas`. All end after `idle_stop_s` without a request.

    `gpu` names what the nodes have, as in plan/hardware/cluster.py: a GPU, a TPU slice, the sockets of a CPU node.
    `gpu_memory_bytes` is the memory of one of them. The layout holds `concurrency` requests at once, if any does. It is
    chosen for `target` (plan/speed/target.py), where requests have `input_tokens` and `output_tokens`.

    `engine_args` are further words for `vllm serve`, put last, so that they win. An option that the pinned vLLM does
    not know is refused unless `allow_unknown_vllm_options`. A size in a config that the planner does not know is
    refused unless `allow_unknown_config_keys`. `tools` gives the engine the parsers of the model's calls of tools and
    reasoning (plan/catalog/parsers.py). An engine that was ready is started again in place `engine_restarts` times
    (None: as often as the launcher does).

    A `keep_up` job submits the next one before its time limit. A `chain` is so many jobs, submitted ahead. Each begins
    `overlap_s` before the end of the one before (None: half an hour). A `preflight_only` job looks at its nodes, and
    ends before it starts an engine.

    `env` are variables of the job. `memory_folders` of the nodes are memory, as /dev/shm is. Jobs of `offline_nodes`
    cannot fetch weights; `weights_help` says how people get them there. `log_dir` None: the service's own folder.
    `site` is the site file that was named, if any. `templates_dir` wins over our own.
    """

    model: str
    service: str
    replicas: int | None = None
    replicas_per_job: int = 1
    max_replicas: int | None = None
    idle_stop_s: float | None = None
    gpu: str = DEFAULT_GPU
    gpu_memory_bytes: int | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_model_len: int | None = None
    concurrency: int = 1
    target: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    arrivals: Arrivals = "steady"
    longest_output_tokens: int | None = None
    backend: Backend = "auto"
    cluster: Cluster = "slurm"
    engine_restarts: int | None = None
    keep_up: bool = False
    tools: bool = False
    chain: int = 1
    preflight_only: bool = False
    overlap_s: float | None = None
    engine_args: tuple[str, ...] = ()
    allow_unknown_vllm_options: bool = False
    allow_unknown_config_keys: bool = False
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    environment: Environment = field(default_factory=Environment)
    settings: JobSettings = field(default_factory=JobSettings)
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: str | None = None
    site: str | None = None
    templates_dir: str | None = None
    memory_folders: tuple[str, ...] = ()
    offline_nodes: bool = False
    weights_help: str | None = None
    jobs_can_submit: bool = True

    @property
    def is_elastic(self) -> bool:
        """Whether the jobs themselves decide how many replicas there are."""
        return self.max_replicas is not None or self.idle_stop_s is not None

    @cached_property
    def engine_options(self) -> Mapping[str, Any]:
        """What `engine_args` say of memory and layout, by EngineConfig's names and `max_model_len`.

        Raises InvalidRequestError for what the plan cannot read.
        """
        from hpc_serve.plan.choice.vllm_flags import read_fields

        return read_fields(self.engine_args)

    @property
    def load_format(self) -> str | None:
        """How `engine_args` tell vLLM to load weights; "dummy" makes random ones, and needs no files."""
        load_format: str | None = value_of(read_arguments(self.engine_args), "--load-format")
        return load_format

    def __post_init__(self) -> None:
        validate_service_name(self.service)
        check_elastic(self.replicas, self.max_replicas, self.idle_stop_s)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1 and (name, value) != ("max_model_len", LONGEST_THAT_FITS):
                option = name.removeprefix("num_").replace("_", "-")
                raise InvalidRequestError(f"{option} is {value}: it must be at least 1.")
        if self.engine_restarts is not None and self.engine_restarts < 0:
            raise InvalidRequestError(f"engine-restarts is {self.engine_restarts}: it must be at least 0.")
        check_choice("backend", self.backend, Backend)
        check_choice("cluster", self.cluster, Cluster)
        if self.cluster == "local" and self.environment.kind == "pyxis":
            raise InvalidRequestError("pyxis is a part of Slurm: with --cluster local name a venv, or another runtime.")
        check_replicas(self.replicas, self.replicas_per_job, self.num_nodes, is_local=self.cluster == "local")
        port = value_of(read_arguments(self.engine_args), "--port")
        asked = {"--keep-up": self.keep_up, "--replicas MIN:MAX": self.max_replicas, "--idle-stop": self.idle_stop_s}
        check_shared_job(self.replicas_per_job, {"--port": port} | asked)
        for option in [option for option, value in asked.items() if value]:
            check_jobs_can_submit(
                option,
                self.cluster,
                self.environment.path if self.environment.is_container else None,
                site_lets_them=self.jobs_can_submit,
            )
        check_chain(
            self.chain,
            self.overlap_s,
            self.slurm.time_limit_s,
            notice_s=self.slurm.notice_s or 0,
            cluster=self.cluster,
            asked=asked,
        )
        check_env(self.env)
        check_arguments(self.engine_args, allow_unknown=self.allow_unknown_vllm_options)
        if self.log_dir is not None:
            if not self.log_dir.startswith("/"):
                raise InvalidRequestError(f"log-dir is {self.log_dir!r}: it must be an absolute path.")
            check_directive("log-dir", self.log_dir)
            expanded_log_dir(self.log_dir, {}, service=self.service, job_id="0")  # refuses other patterns
