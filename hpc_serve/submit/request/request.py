"""A person's request as one value, checked as far as possible without a cluster.

The planner decides whether the model fits, and Slurm whether the partition exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, partial
from typing import Any, Literal

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import Arrivals
from hpc_serve.plan.hardware import DEFAULT_GPU
from hpc_serve.rendezvous.fields import expanded_log_dir, validate_service_name
from hpc_serve.rendezvous.record import DEFAULT_MACHINE
from hpc_serve.submit.request.bounds import (
    begins_after_min,
    check_bounds,
    check_chain,
    check_jobs_can_submit,
    check_replicas,
    is_machine_name,
)
from hpc_serve.submit.request.options import (
    Environment,
    JobSettings,
    SlurmOptions,
    check_choice,
    check_directive,
    check_env,
    check_least,
    option,
)
from hpc_serve.vllm.arguments import Argument, read_arguments, value_of
from hpc_serve.vllm.command import OVERRULE, check_arguments

Backend = Literal["auto", "ray", "mp"]
Cluster = Literal["slurm", "local"]

_flag = partial(option, default=False)
_of_plan = partial(option, of_plan=True)
_count = partial(option, metavar="N", least=1)
_plan_count = partial(_count, of_plan=True)


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """One service as asked for. None means: the planner, or the site, decides.

    `replicas` are dealt to jobs, tasks of one array; the `replicas_per_job` replicas of a job divide its node. The jobs
    decide how many replicas there are, up to `max_replicas`. All end after `idle_stop_s` without a request.

    `gpu` names what the nodes have, as in plan/hardware.py: a GPU, a TPU slice, the sockets of a CPU node.
    `gpu_memory_bytes` is the memory of one of them. The layout holds `concurrency` requests at once, if any does. It is
    chosen for `target` (plan/speed/target.py), where requests have `input_tokens` and `output_tokens`.

    `engine_args` are further words for `vllm serve`, put last, so that they win. An option that the pinned vLLM does
    not know is refused unless `allow_unknown_vllm_options`. A size in a config that the planner does not know is
    refused unless `allow_unknown_config_keys`. `tools` gives the engine the parsers of the model's calls of tools and
    reasoning (plan/catalog/parsers.json). An engine that was ready is started again in place `engine_restarts` times
    (None: as often as the launcher does).

    A `keep_up` job submits the next one before its time limit. A `chain` is so many jobs, submitted ahead. Each begins
    `overlap_s` before the end of the one before (None: half an hour). A `preflight_only` job looks at its nodes, and
    ends before it starts an engine.

    `machine` is the kind of machine of the site file that the request is for.

    `env` are variables of the job. `memory_folders` of the nodes are memory, as /dev/shm is. `hub_cache` is the jobs'
    folder of downloaded models (None: as `env` says). Jobs of `offline_nodes` cannot fetch weights; `weights_help` says
    how people get them there. `log_dir` None: the service's own folder. `site` is the site file that was named, if any.
    `templates_dir` wins over our own.
    """

    model: str
    service: str = option(
        "Name of the service [default: the model's].", "NAME", default=MISSING, spelled=("--name", "--service")
    )
    replicas: int | None = option(
        "Replicas, a job each, one array; 1:4: more while requests wait; h100:2,a100:1: on machines of the site file "
        "[default: as --target takes, or 1].",
        "N|MIN:MAX|NAME:N,…",
        kind="replicas",
        least=1,
    )
    replicas_per_job: int = option(
        "Replicas in each job: they divide its node's GPUs evenly [default: 1].", "K", default=1, least=1
    )
    chain: int = _count(
        "Submit N jobs ahead, each to take over before the time limit of the one before; no job calls sbatch.",
        default=1,
    )
    overlap_s: float | None = option(
        "With --chain: how long before a job's limit the next may begin [default: 30m, or half of it].",
        kind="time",
        spelled=("--overlap",),
    )
    max_replicas: int | None = None
    idle_stop_s: float | None = option(
        "End all jobs after so long without a request (30m); `hpc-serve wake` brings them back.",
        kind="time",
        least=1,
        spelled=("--idle-stop",),
    )
    num_nodes: int | None = _plan_count("Number of nodes [default: as few as fit].", spelled=("--nodes",))
    gpus_per_node: int | None = _plan_count("GPUs that a node has; the plan says how many are used.")
    gpu: str = _of_plan(
        f"Accelerator of the nodes: mi300x, v5e:4x4, cpu-spr-2s … [default: site file, or {DEFAULT_GPU}].",
        "NAME",
        default=DEFAULT_GPU,
        unset=None,
    )
    gpu_memory_bytes: int | None = _of_plan(
        "Memory of one GPU, as its driver shows it (79.2GiB); for CPUs, the part of a socket's memory that the job may "
        "use [default: known].",
        "SIZE",
        kind="size",
        spelled=("--gpu-memory",),
    )
    tensor_parallel_size: int | None = _plan_count(
        "GPUs that share each layer.", spelled=("--tensor-parallel-size", "-tp")
    )
    pipeline_parallel_size: int | None = _plan_count(
        "Stages the layers are dealt to.", spelled=("--pipeline-parallel-size", "-pp")
    )
    max_model_len: int | None = _of_plan(
        "Longest context: 131072, 128k; auto: the longest that fits the machines [default: the model's].",
        "TOKENS",
        kind="tokens",
        least=1,
    )
    concurrency: int = _plan_count(
        "Requests at once, of full length or as given here; a request without room in the cache waits.", default=1
    )
    target: str | None = _of_plan("throughput, tpot=50ms, ttft=2s: choose layout and replicas for it.", "WHAT")
    input_tokens: int | None = _plan_count("Prompt of a request [default: 1024].", kind="positive")
    output_tokens: int | None = _plan_count("Answer of a request [default: 256].", kind="positive")
    requests: int | None = _plan_count(
        "N requests arrive at once, and then no more come: a burst, of which some may wait.", kind="positive"
    )
    arrivals: Arrivals = option(
        "steady: always so many requests in flight; burst: all at once, then no more [default: steady].",
        default="steady",
        of_plan=True,
    )
    longest_output_tokens: int | None = _plan_count(
        "In a burst: the longest answer; --output-tokens is the average.", kind="positive"
    )
    prefix_hits: float | None = _of_plan(
        "Share of each prompt that an earlier request began with, and that is in the cache (0.6) [default: 0].",
        "SHARE",
        kind="share",
    )
    acceptance_length: float | None = _of_plan(
        "With --speculative-config: tokens that a step gives a request, as vLLM logs it [default: as published, or 1].",
        "TOKENS",
        kind="least_one",
    )
    backend: Backend = option(
        "Program that joins the nodes: Ray, or vLLM's own start "
        "[default: ray for several nodes without data-parallel ranks, else none].",
        default="auto",
    )
    cluster: Cluster = option("Slurm, or this machine alone.", default="slurm")
    engine_restarts: int | None = option(
        "How often an engine that was ready is started again in place when it ends or hangs [default: 3].", "N", least=0
    )
    log_dir: str | None = option("Folder of the logs [default: the service's own folder].", "FOLDER")
    site: str | None = option("Your site file [default: ~/.config/hpc-serve/site.yaml].", "FILE")
    once: bool = _flag("Submit nothing if the service waits, starts or serves already, or another program submits it.")
    keep_up: bool = _flag(
        "Go on across time limits: each job submits the next early enough, and ends once the next is ready."
    )
    tools: bool = _flag(
        "Let requests call tools, and part reasoning from answers: with the parsers that the catalogue knows."
    )
    allow_unknown_vllm_options: bool = _flag(
        "Let options after -- pass that the pinned vLLM does not know: the job has another version, or a plugin.",
        spelled=(OVERRULE,),
    )
    allow_unknown_config_keys: bool = _of_plan(
        "Plan although the model's config has sizes that the planner does not know, at your own risk.", default=False
    )
    preflight_only: bool = False
    machine: str = DEFAULT_MACHINE
    engine_args: tuple[str, ...] = ()
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    environment: Environment = field(default_factory=Environment)
    settings: JobSettings = field(default_factory=JobSettings)
    env: Mapping[str, str] = field(default_factory=dict)
    templates_dir: str | None = None
    memory_folders: tuple[str, ...] = ()
    hub_cache: str | None = None
    offline_nodes: bool = False
    weights_help: str | None = None
    jobs_can_submit: bool = True

    @property
    def is_elastic(self) -> bool:
        """Return whether the jobs themselves decide how many replicas there are."""
        return self.max_replicas is not None or self.idle_stop_s is not None

    @cached_property
    def engine_options(self) -> Mapping[str, Any]:
        """Return the memory and layout options of `engine_args`, by EngineConfig's names and `max_model_len`.

        Raises InvalidRequestError for a value that the plan cannot read.
        """
        from hpc_serve.plan.choice.layout import read_fields

        return read_fields(self.engine_args)

    @cached_property
    def _arguments(self) -> tuple[Argument, ...]:
        return read_arguments(self.engine_args)

    @cached_property
    def engine_option_names(self) -> frozenset[str]:
        """Return the names of the options in `engine_args`."""
        return frozenset(argument.name for argument in self._arguments)

    def engine_option(self, name: str) -> Any:
        """Return the value of an option in `engine_args`; None if it is not there."""
        return value_of(self._arguments, name)

    @property
    def load_format(self) -> str | None:
        """Return how `engine_args` tell vLLM to load weights; "dummy" makes random ones, and needs no files."""
        load_format: str | None = self.engine_option("--load-format")
        return load_format

    @property
    def next_begins_after_min(self) -> int:
        """Return the minutes from the start of a job of a chain to the earliest start of the next one."""
        return begins_after_min(self.slurm.time_limit_s or 0.0, self.overlap_s)

    def __post_init__(self) -> None:
        validate_service_name(self.service)
        if not is_machine_name(self.machine):
            raise InvalidRequestError(f"machine is {self.machine!r}: it must be a name of the site file's machines.")
        if self.max_replicas is not None:
            check_bounds(self.replicas if self.replicas is not None else 1, self.max_replicas)
        check_least(self)
        check_choice("backend", self.backend, Backend)
        check_choice("cluster", self.cluster, Cluster)
        if self.cluster == "local" and self.environment.kind == "pyxis":
            raise InvalidRequestError("pyxis is a part of Slurm: with --cluster local name a venv, or another runtime.")
        exact = self.replicas if self.max_replicas is None else None  # bounds are rounded up to whole jobs
        is_local, port = self.cluster == "local", self.engine_option("--port")
        check_replicas(exact, self.replicas_per_job, self.num_nodes, is_local=is_local, port=port)
        asked = {"--keep-up": self.keep_up, "--replicas MIN:MAX": self.max_replicas, "--idle-stop": self.idle_stop_s}
        for name in [name for name, value in asked.items() if value]:
            image = self.environment.path if self.environment.is_container else None
            check_jobs_can_submit(name, self.cluster, image, site_lets_them=self.jobs_can_submit)
        limit_s, notice_s = self.slurm.time_limit_s, self.slurm.notice_s or 0
        check_chain(self.chain, self.overlap_s, limit_s, notice_s=notice_s, cluster=self.cluster)
        check_env(self.env)
        check_arguments(self.engine_args, allow_unknown=self.allow_unknown_vllm_options)
        if self.log_dir is not None:
            if not self.log_dir.startswith("/"):
                raise InvalidRequestError(f"log-dir is {self.log_dir!r}: it must be an absolute path.")
            check_directive("log-dir (--log-dir; by default below HPC_SERVE_HOME)", self.log_dir)
            expanded_log_dir(self.log_dir, {}, service=self.service, job_id="0")  # refuses other patterns


OPTIONS = tuple(one for one in fields(ServeRequest) if "help" in one.metadata)
"""The fields that are options of `submit`, in the order of a script's line "Rendered by"."""
