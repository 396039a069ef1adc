"""The record of a replica, written by its head, and the note that `submit` writes about a job: the values. Pure.

A record is a hint that expires when it is not renewed. This module decides its fields. It does not find out whether an
engine answers at the address: readers do. Each record says which LoRA adapters its engine has; `wanted.json` says which
there are to be. Jobs of a chain are submitted ahead, and their notes tell which come before a job, and which after it.
Slurm decides when each begins, and job/run/record_keeper.py what a job does about the jobs before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from hpc_serve.errors import InvalidRequestError
from hpc_serve.redact import redact, redact_lines
from hpc_serve.rendezvous.fields import (
    Bounds,
    SignedInt,
    Timestamp,
    is_service_name,
    record_file_name,
    replica_name,
    validate_job_id,
)
from hpc_serve.units import layout_text

# -- LoRA adapters

LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""Routes of an engine. Its gate takes them from its launcher alone."""
ONE_REPLICA_ALONE = (
    "This would change one replica of the service, until its engine starts again. For all of them, and those to come: "
    "hpc-serve adapter add SERVICE NAME FOLDER, or hpc-serve adapter remove SERVICE NAME."
)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A folder with an adapter. Each one that is added has its own `added_at`, so an engine knows which it has loaded.

    In a record, `fault` says why the engine has not loaded it.
    """

    path: str
    added_at: Timestamp
    fault: str = ""


def check_adapter_name(name: str) -> None:
    """Raises InvalidRequestError for a name that is no model's name of this kind."""
    if not is_service_name(name):
        raise InvalidRequestError(
            f"{name!r} cannot name an adapter: use 1 to 63 letters, digits, dots, dashes and underscores."
        )


# -- records

VERSION = 1
DEFAULT_MACHINE = "default"
"""The kind of machine that the site file's own settings describe."""

# unresponsive: the engine runs, and its launcher has found that it answers nothing.
RecordState = Literal["starting", "ready", "unresponsive", "draining", "stopped", "failed"]
_FinalState = Literal["failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a stage is: `done` of `total` things that the stage names (nodes joined, shards loaded)."""

    done: int
    total: int


# The stages of a start in their order. nodes: until all launchers, and Ray's nodes, are there. staging: until each node
# has a copy of the model, if that is wanted. engine: until it begins with its weights. capture: profiling, KV cache and
# CUDA graphs. server: until it has answered a first request.
START_STAGES = ("nodes", "staging", "engine", "weights", "compile", "capture", "server")


@dataclass(frozen=True, kw_only=True)
class StartRecord:
    """The progress of a start. Its `stage`, one of START_STAGES, began at `since`; "" once the replica was ready.

    `took_s` has the seconds of each finished stage. `checkpoint_bytes` is the size of the weights' files, and
    `bytes_per_s` the speed at which they are, or were, loaded. Counted from the record's `updated_at`, the replica is
    ready in `time_left_s` by its last start here, and the weights are loaded in `weights_left_s`; None: not known.
    """

    stage: str
    since: Timestamp
    took_s: Mapping[str, float] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    bytes_per_s: float | None = None
    time_left_s: float | None = None
    weights_left_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node of the job: Slurm's name of it, else its host name; and the address of the engine's processes there."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class EndpointRecord:
    """One replica: one engine that serves `service`. Only the launcher on its head node writes the record.

    `hosts` are addresses of the head in order of preference, `port` is the engine's. The record is renewed every
    `lease_s / 3` seconds at the latest, and `counter` grows with every renewal. `started_at`, `updated_at` and
    `state_since`, when the present state began, are seconds since the epoch by the writer's clock. `measured` and
    `predicted` hold figures by name, in bytes, seconds and tokens; `start_s` is the time from `started_at` until it was
    ready for the first time. `reason` says why a replica is unresponsive, drains or has ended, or why its engine is
    started again, which has happened `engine_restarts` times. `last_log_lines` are the last lines of the part that
    failed. `certificate` (PEM) is what the engine shows to whoever connects. `cache` says whether the engine found code
    that an earlier start had compiled, and where. `loading` says by which strategy its weights are read, and why.
    `replica` counts the `replicas_per_job` replicas of its job from 0. `drain_cause` says why it drains, or drained
    (rendezvous/store.py). `signs` says that the engine's gate sends signs within its answers to clients that ask for
    them. `adapters` are those of what is wanted that its engine has loaded, or has failed to load. `weight_version` is
    what a program that changes the weights calls them; "" if the engine does not say it, as outside of vLLM's
    development mode.
    """

    service: str
    model: str
    cluster: str
    job_id: str
    user: str
    hosts: tuple[str, ...]
    port: Annotated[int, Bounds(0, 65535)]
    started_at: Timestamp
    updated_at: Timestamp
    stand_in: str | None = None
    served_model_names: tuple[str, ...] = ()
    restart: int = 0
    replica: int = 0
    state: RecordState = "starting"
    stage: str = ""
    progress: Progress | None = None
    reason: str | None = None
    failed_part: str | None = None
    exit_code: SignedInt | None = None
    last_log_lines: tuple[str, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_nodes: int = 1
    gpus_per_node: int = 0
    counter: int = 0
    lease_s: float = 30.0
    log_dir: str | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    certificate: str = ""
    state_since: Timestamp | None = None
    engine_restarts: int = 0
    cache: str = ""
    loading: str = ""
    replicas_per_job: Annotated[int, Bounds(1, 1024)] = 1
    start: StartRecord | None = None
    signs: bool = False
    drain_cause: str = ""
    data_parallel_size: int = 1
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    weight_version: str = ""
    version: int = VERSION

    @property
    def name(self) -> str:
        """Return the record's file name. Raises InvalidRequestError when the job id cannot be part of one."""
        return record_file_name(self.job_id, self.restart, self.replica)

    @property
    def stage_words(self) -> str:
        """Its stage, and how far that is."""
        stage = self.stage or self.state
        return f"{stage} {self.progress.done}/{self.progress.total}" if self.progress else stage

    @property
    def layout(self) -> str:
        """The sizes of the engine's layout, as `TP=8 PP=2`."""
        return layout_text(self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)

    def is_overdue(self, now: float) -> bool:
        """Return whether renewals are missing at `now`, in seconds since the epoch.

        Clocks differ, so this decides which replica is asked first, and never that a job is over.
        """
        return now - self.updated_at > 2 * self.lease_s

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that its engine has loaded."""
        return tuple(name for name, adapter in self.adapters.items() if not adapter.fault)

    @property
    def num_gpus(self) -> int:
        """Return how many GPUs its engine has, on all its nodes. Its job may hold more."""
        return self.num_nodes * self.gpus_per_node

    @property
    def is_final(self) -> bool:
        """Return whether the replica has ended, so that the record will not change any more."""
        return self.state in get_args(_FinalState)

    def without_secrets(self) -> EndpointRecord:
        """Return the same without the secrets that its words may hold: they are those of engines and logs."""
        if self.reason is None and not self.last_log_lines:
            return self
        lines = tuple(redact_lines(self.last_log_lines))
        return replace(self, reason=self.reason and redact(self.reason), last_log_lines=lines)


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended that never published a record. `at` is seconds since the epoch by the clock of who ended it."""

    state: _FinalState
    reason: str
    at: Timestamp
    exit_code: SignedInt | None = None


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that `submit` handed over. `script` and `log_path` are file names; `end` is added by `stop`.

    `pid` and `pid_start_time` (clock ticks since boot, field 22 of /proc/PID/stat) identify a local job's process on
    the host that submitted it. `submitted_at` is seconds since the epoch by the writer's clock. `engine_args` are the
    options of `vllm serve` in the script, and `gpu` with `gpu_memory_bytes` is the accelerator that it was planned for.
    `predecessor` is the job before it in a chain, from which it takes over; each job of one has `time_limit_s`.
    `machine` is the kind of machine that it was planned for, as the site file names it.
    """

    service: str
    model: str
    cluster: str
    job_id: str
    submitted_at: Timestamp
    script: str | None = None
    log_path: str | None = None
    user: str = ""
    num_nodes: int = 1
    gpus_per_node: int = 0
    pid: int | None = None
    pid_start_time: int | None = None
    host: str | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    end: JobEnd | None = None
    replicas_per_job: Annotated[int, Bounds(1, 1024)] = 1
    engine_args: tuple[str, ...] = ()
    gpu: str = ""
    gpu_memory_bytes: int | None = None
    predecessor: str = ""
    time_limit_s: float = 0.0
    machine: str = DEFAULT_MACHINE
    version: int = VERSION

    @property
    def name(self) -> str:
        """Return the file name below `submitted/`. Raises InvalidRequestError when the job id cannot be one."""
        return f"{validate_job_id(self.job_id)}.json"

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Return the names of the job's replicas for people."""
        return tuple(
            replica_name(self.job_id, replica, self.replicas_per_job) for replica in range(self.replicas_per_job)
        )


# -- chains of jobs


def predecessors_of(job_id: str, submitted: Sequence[SubmittedJob]) -> list[SubmittedJob]:
    """Return the jobs from which a job takes over, the nearest first."""
    known = {job.job_id: job for job in submitted}
    found: list[SubmittedJob] = []
    before = known[job_id].predecessor if job_id in known else ""
    while before in known and before != job_id and known[before] not in found:
        found.append(known[before])
        before = known[before].predecessor
    return found


def followers_of(job_ids: Sequence[str], submitted: Sequence[SubmittedJob]) -> list[str]:
    """Return the jobs that take over from these, and from those in turn, in order; not these themselves."""
    after = {job.predecessor: job.job_id for job in submitted if job.predecessor}
    found: list[str] = []
    for job_id in job_ids:
        while (job_id := after.get(job_id, "")) and job_id not in found:
            found.append(job_id)
    return [job_id for job_id in found if job_id not in job_ids]
