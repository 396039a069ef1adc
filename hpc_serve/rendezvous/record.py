"""What a replica says about itself, and what `submit` says about a job, as values and as JSON.

A record is a hint with a lease: this module decides its fields and refuses text that does not have them;
whether an engine really answers there is for the reader to probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from hpc_serve.rendezvous.fields import FieldReader, to_json_text
from hpc_serve.rendezvous.names import record_file_name, validate_job_id

VERSION = 1

State = Literal["starting", "ready", "draining", "stopped", "failed"]
STATES: tuple[State, ...] = get_args(State)
FinalState = Literal["stopped", "failed"]
FINAL_STATES: frozenset[FinalState] = frozenset(get_args(FinalState))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a stage is: `done` of `total` things that the stage names (nodes joined, shards loaded)."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """A node of the job: its host name and the address that the engine's processes use."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class EndpointRecord:
    """One replica: one engine that serves `service`, written by its head node alone.

    `hosts` are addresses of the head in order of preference, `port` is the engine's. `counter` grows with every
    renewal, which come every `lease_s / 3` seconds at the latest; `started_at` and `updated_at` are seconds since the
    epoch by the writer's clock. `measured` and `predicted` hold figures by name, in bytes, seconds and tokens.
    """

    service: str
    model: str
    cluster: str
    job_id: str
    user: str
    hosts: tuple[str, ...]
    port: int
    started_at: float
    updated_at: float
    stand_in: str | None = None
    served_model_names: tuple[str, ...] = ()
    restart: int = 0
    replica: int = 0
    state: State = "starting"
    stage: str = ""
    progress: Progress | None = None
    reason: str | None = None
    failed_part: str | None = None
    exit_code: int | None = None
    last_words: tuple[str, ...] = ()
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
    version: int = VERSION

    @property
    def name(self) -> str:
        """The record's file name. Raises InvalidRequestError when the job id cannot be part of one."""
        return record_file_name(self.job_id, self.restart, self.replica)

    @property
    def is_final(self) -> bool:
        """Whether the replica has said its last word."""
        return self.state in FINAL_STATES

    def to_json(self) -> str:
        """The record as one JSON object, with every field."""
        return to_json_text(self)

    @classmethod
    def from_json(cls, text: str, *, source: str = "record") -> EndpointRecord:
        """Read a record; fields that a newer version added are ignored. Raises RecordError: `source` and field."""
        read = FieldReader.parse(text, source)
        return cls(
            version=read.integer("version"),
            service=read.text("service"),
            model=read.text("model"),
            stand_in=read.optional_text("stand_in"),
            served_model_names=read.texts("served_model_names"),
            cluster=read.text("cluster"),
            job_id=read.text("job_id"),
            restart=read.integer("restart"),
            replica=read.integer("replica"),
            user=read.text("user"),
            state=cast(State, read.choice("state", STATES)),
            stage=read.text("stage"),
            progress=_progress(read),
            reason=read.optional_text("reason"),
            failed_part=read.optional_text("failed_part"),
            exit_code=read.optional_integer("exit_code"),
            last_words=read.texts("last_words"),
            hosts=read.texts("hosts"),
            port=read.integer("port", at_most=65535),
            nodes=tuple(
                NodeRecord(name=node.text("name"), address=node.text("address")) for node in read.objects("nodes")
            ),
            tensor_parallel_size=read.integer("tensor_parallel_size"),
            pipeline_parallel_size=read.integer("pipeline_parallel_size"),
            num_nodes=read.integer("num_nodes"),
            gpus_per_node=read.integer("gpus_per_node"),
            counter=read.integer("counter"),
            lease_s=read.number("lease_s"),
            started_at=read.number("started_at"),
            updated_at=read.number("updated_at"),
            log_dir=read.optional_text("log_dir"),
            measured=read.numbers("measured"),
            predicted=read.numbers("predicted"),
        )


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended that never published a record, told by who ended it; `at` is seconds since the epoch."""

    state: FinalState
    reason: str
    at: float
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that `submit` handed over. `script` and `log_path` are file names; `end` is added by `stop`.

    `pid` and `pid_start_time` (clock ticks since boot, field 22 of /proc/PID/stat) identify a local job's process on
    the host that submitted it. `submitted_at` is seconds since the epoch by the writer's clock.
    """

    service: str
    model: str
    cluster: str
    job_id: str
    submitted_at: float
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
    version: int = VERSION

    @property
    def name(self) -> str:
        """The file name below `submitted/`. Raises InvalidRequestError when the job id cannot be one."""
        return f"{validate_job_id(self.job_id)}.json"

    def to_json(self) -> str:
        """The job as one JSON object, with every field."""
        return to_json_text(self)

    @classmethod
    def from_json(cls, text: str, *, source: str = "submitted job") -> SubmittedJob:
        """Read a submitted job; unknown fields are ignored. Raises RecordError, naming `source` and field."""
        read = FieldReader.parse(text, source)
        return cls(
            version=read.integer("version"),
            service=read.text("service"),
            model=read.text("model"),
            cluster=read.text("cluster"),
            job_id=read.text("job_id"),
            submitted_at=read.number("submitted_at"),
            script=read.optional_text("script"),
            log_path=read.optional_text("log_path"),
            user=read.text("user"),
            num_nodes=read.integer("num_nodes"),
            gpus_per_node=read.integer("gpus_per_node"),
            pid=read.optional_integer("pid"),
            pid_start_time=read.optional_integer("pid_start_time"),
            host=read.optional_text("host"),
            predicted=read.numbers("predicted"),
            end=_end(read),
        )


def _end(read: FieldReader) -> JobEnd | None:
    if not read.has("end"):  # notes of earlier versions
        return None
    if (inner := read.optional_object("end")) is None:
        return None
    state = cast(FinalState, inner.choice("state", sorted(FINAL_STATES)))
    return JobEnd(
        state=state, reason=inner.text("reason"), at=inner.number("at"), exit_code=inner.optional_integer("exit_code")
    )


def _progress(read: FieldReader) -> Progress | None:
    inner = read.optional_object("progress")
    return None if inner is None else Progress(done=inner.integer("done"), total=inner.integer("total"))
