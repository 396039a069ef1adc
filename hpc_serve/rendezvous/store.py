"""The shared folder of services: its files, who writes them, how they are read and ordered, and when they are removed.

Each record has one writer, so readers need no lock. The content of a file is a hint: the client probes whether an
engine answers, and only the scheduler knows whether a job exists. An entry that is not trusted becomes a problem with a
reason. claims.py decides who may use a name. Two files lie beside a record. One asks its replica to drain, and every
program that may write into the folder may write it; the head decides what draining is, and how long it may take. The
other is the report of the preflight; `hpc_serve.job.preflight` decides which checks there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.rendezvous.fields import (
    MAY_BE_MISSING,
    Timestamp,
    array_of,
    forgotten_file_name,
    from_json_text,
    is_record_file_name,
    is_service_name,
    to_json_text,
    validate_service_name,
)
from hpc_serve.rendezvous.files import (
    FileVersion,
    check_folder,
    list_folder,
    list_newest_first,
    make_key,
    make_private_folder,
    overwrite_private,
    read_json,
    read_key,
    read_private,
    remove_file,
    write_json,
    write_private,
)
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob
from hpc_serve.units import number_of

# -- entries

# An entry about a job, written by its head node or by `submit`.
JobEntry = EndpointRecord | SubmittedJob
_Entry = TypeVar("_Entry", EndpointRecord, SubmittedJob)


@dataclass(frozen=True, kw_only=True)
class ServiceRecords:
    """The files of a service, oldest first. `problems` names the files that are not trusted, and why.

    `unreadable` are the names of existing records that could not be read, or are not trusted.
    """

    service: str
    records: tuple[EndpointRecord, ...] = ()
    submitted: tuple[SubmittedJob, ...] = ()
    problems: tuple[str, ...] = ()
    unreadable: frozenset[str] = frozenset()

    @property
    def exists(self) -> bool:
        return bool(self.records or self.submitted)

    def without_record(self) -> tuple[SubmittedJob, ...]:
        """Submitted jobs that have not published a record yet."""
        started = _jobs_begun(record.job_id for record in self.records)
        return tuple(job for job in self.submitted if job.job_id not in started)

    def awaiting_record(self) -> tuple[SubmittedJob, ...]:
        """Return submitted jobs without a record and without a known end; the scheduler may know that they ended."""
        return tuple(job for job in self.without_record() if job.end is None)


def _jobs_begun(job_ids: Iterable[str]) -> set[str]:
    """Return `job_ids`, the ids of jobs with a record, and for the task of an array also the array's id."""
    return {begun for job_id in job_ids for begun in (job_id, array_of(job_id))}


def read_submitted(
    folder: Path, service: str, problems: list[str], *, without: Set[str] = frozenset()
) -> list[SubmittedJob]:
    """Return the submitted jobs of a service's folder, but for those `without`."""
    return [
        job
        for name in list_folder(folder / "submitted")
        if name.endswith(".json") and not name.startswith(".") and name.removesuffix(".json") not in without
        if (job := read_entry(folder / "submitted" / name, SubmittedJob, service, problems)) is not None
    ]


def _began_or_ended_at(record: EndpointRecord) -> tuple[float, str]:
    """When a replica began or, if it is over, when it ended; and its name, for replicas of the same moment."""
    return record.updated_at if record.is_final else record.started_at, record.name


def read_entry(
    path: Path, kind: type[_Entry], service: str, problems: list[str], *, owner: int | None = None
) -> _Entry | None:
    """Read a record or a submitted job; None if it is gone or not trusted. `problems` gets the reason.

    `owner` is the number of another user who shares it. The words of a record may hold secrets yet.
    """
    try:
        entry = from_json_text(kind, read_private(path, owner=owner), source=str(path))
        if entry.service != service or entry.name != path.name:
            raise RecordError(f"{path} says it is {entry.name} of {entry.service}: it was copied; remove it.")
        return entry
    except FileNotFoundError:  # listed from a stale cache, or swept a moment ago
        return None
    except HpcServeError as error:
        problems.append(str(error))
        return None


RecordFile = tuple[str, FileVersion]
"""A record by its file's name, and which version of the file was seen."""


class EntryFiles:
    """The files of one service in `folder`, read again and again. Safe to share between threads.

    `owner` is the number of another user who shares the service; what was submitted is not shared.

    A record that says how its replica ended never changes again. If it `passes_over_ended`, such a record is read once,
    and passed over afterwards. The newest record is read first.
    """

    def __init__(self, folder: Path, service: str, *, passes_over_ended: bool = True, owner: int | None = None) -> None:
        self._folder, self._service, self._passes_over_ended = folder, service, passes_over_ended
        self._owner = owner
        self._ended: dict[str, FileVersion] = {}

    def files(self, wanted: Set[str] = frozenset()) -> tuple[list[RecordFile], Set[str]]:
        """Return the files of records that may be live, the newest first, and the names of all. Raises StoreError.

        Records in `wanted` are always among the files.
        """
        check_folder(self._folder, owner=self._owner)
        found = [file for file in list_newest_first(self._folder) if is_record_file_name(file[0])]
        live = [file for file in found if self._ended.get(file[0]) != file[1] or file[0] in wanted]
        return live, {name for name, _ in found}

    def read(
        self, files: Iterable[RecordFile], problems: list[str], wanted: Set[str] = frozenset()
    ) -> list[EndpointRecord]:
        """Read the records that have not ended or are `wanted`. `problems` gets why others are not trusted."""

        found = []
        for name, version in files:
            record = read_entry(self._folder / name, EndpointRecord, self._service, problems, owner=self._owner)
            if record is not None and record.is_final and self._passes_over_ended:
                self._ended[name] = version
                record = record if name in wanted else None
            if record is not None:
                found.append(record.without_secrets())
        return found

    def read_all(self, wanted: Set[str] = frozenset()) -> ServiceRecords:
        """Read all entries, oldest first. Raises StoreError.

        If it `passes_over_ended`, records that have ended are left out, but for those `wanted`, and so are submitted
        jobs that have a record.
        """
        files, names = self.files(wanted)
        problems: list[str] = []
        records = self.read(files, problems, wanted)
        begun = _jobs_begun(name.rpartition("-r")[0] for name in names) if self._passes_over_ended else frozenset()
        ours = self._owner is None
        submitted = read_submitted(self._folder, self._service, problems, without=begun) if ours else []
        return ServiceRecords(
            service=self._service,
            records=tuple(sorted(records, key=_began_or_ended_at)),
            submitted=tuple(sorted(submitted, key=lambda job: (job.submitted_at, job.job_id))),
            problems=tuple(problems),
            unreadable=frozenset(names - self._ended.keys() - {record.name for record in records}),
        )


# -- the store

WEEK_S = 7 * 24 * 3600.0
_BESIDE_RECORDS = (".drain", ".preflight", ".forgotten")

# A record that was not renewed for so long is over, whatever the clocks of its writer and its reader say.
ABANDONED_AFTER_S = 900.0


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of process `pid`; None if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may itself hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(job: SubmittedJob) -> bool:
    """Return whether the process of a local job of this machine is there.

    Without a start time, it had ended before that could be read.
    """
    return job.pid is not None and job.pid_start_time is not None and process_start_time(job.pid) == job.pid_start_time


def is_gone(job: SubmittedJob) -> bool:
    """Return whether the process of a local job has ended; False on another machine, which cannot see it."""
    return job.cluster == "local" and job.host == os.uname().nodename and job.pid is not None and not is_alive(job)


def default_home(environ: Mapping[str, str]) -> Path:
    """`$HPC_SERVE_HOME`, else `~/.hpc-serve`, as an absolute path. Raises StoreError if there is no home directory."""
    named = environ.get("HPC_SERVE_HOME")
    try:
        path = Path(named).expanduser() if named else Path(environ.get("HOME") or Path.home()) / ".hpc-serve"
    except RuntimeError as error:
        raise StoreError(f"no folder for services: {error} Set HPC_SERVE_HOME.") from None
    return path.absolute()


@dataclass(eq=False)
class ServiceStore:
    """The files below `home` (see docs/design/record.md). Reading makes nothing; writing makes the folders it needs.

    `owner` is the number of another user who shares services of theirs; nothing can be written then.
    """

    home: Path
    owner: int | None = field(default=None, kw_only=True)

    def service_dir(self, service: str) -> Path:
        """Raises InvalidRequestError if `service` cannot be a folder's name."""
        return self.home / "services" / validate_service_name(service)

    def beside_record(self, service: str, record_name: str, ending: str) -> Path:
        """Return a file beside a replica's record. Raises InvalidRequestError for a name that no service has."""
        return (self.service_dir(service) / record_name).with_suffix(ending)

    def log_dir(self, service: str) -> Path:
        return self.service_dir(service) / "logs"

    def api_key_path(self, service: str) -> Path:
        return self.service_dir(service) / "api_key"

    def ensure_service(self, service: str) -> Path:
        """Make the service's private folders and return the first. Raises StoreError."""
        folder = self.service_dir(service)
        make_private_folder(self.home, tighten=False)
        make_private_folder(self.home / "services")
        for path in (folder, folder / "submitted", folder / "logs"):
            make_private_folder(path)
        return folder

    def services(self) -> tuple[str, ...]:
        """Return the names that have a folder, sorted. Raises StoreError."""
        parent = self.home / "services"
        check_folder(parent)
        return tuple(name for name in list_folder(parent) if is_service_name(name) and (parent / name).is_dir())

    def read(self, service: str) -> ServiceRecords:
        """Everything written about a service. A file that is not trusted becomes one of the `problems`.

        Raises StoreError when the folder itself cannot be read.
        """
        folder = self.service_dir(service)
        return EntryFiles(folder, service, passes_over_ended=False, owner=self.owner).read_all()

    def live(self, service: str) -> EntryFiles:
        """Return the entries that a client may use, to be read again and again."""
        return EntryFiles(self.service_dir(service), service, owner=self.owner)

    def write(self, record: EndpointRecord, *, makes_folders: bool = True) -> Path:
        """Replace a replica's record, without secrets in its words; its head is the only writer. Raises StoreError.

        On a full disk the record of an end is written over the last one.
        If `makes_folders` is false, a home that was moved away is not made anew, and the error says that it is gone.
        """
        folder = self.service_dir(record.service)
        if makes_folders:
            self.ensure_service(record.service)
        else:
            self.require_service(record.service)
        path, record = folder / record.name, record.without_secrets()
        try:
            write_json(path, record, is_shared=True)
        except StoreError:
            if not record.is_final or not overwrite_private(path, to_json_text(record)):
                raise
        return path

    def require_service(self, service: str) -> None:
        """Raise StoreError if the folder of a service is not there."""
        folder = self.service_dir(service)
        if not folder.is_dir():
            gone = folder if self.home.is_dir() else self.home
            raise StoreError(f"{gone} is gone: it was moved, removed or unmounted. Move it back.")

    def write_submitted(self, job: SubmittedJob) -> None:
        """Write down that a job was handed to the scheduler, or how it ended before it began. Raises StoreError."""
        write_json(self.ensure_service(job.service) / "submitted" / job.name, job)

    def read_submitted(self, service: str) -> tuple[SubmittedJob, ...]:
        """Return the jobs that `submit` wrote down and that can be read, oldest first."""
        return self.read(service).submitted

    def ensure_api_key(self, service: str) -> Path:
        """Return the file of the service's API key, made if it is missing; two makers at once end with one key.

        Raises StoreError, or RecordError if others can read the key that is there.
        """
        self.ensure_service(service)
        path = self.api_key_path(service)
        make_key(path, is_shared=True)
        self.read_api_key(service)
        return path

    def read_api_key(self, service: str) -> str:
        """Return the key. Never put it in a log, a command line or an error. Raises StoreError or RecordError."""
        path = self.api_key_path(service)
        check_folder(path.parent, owner=self.owner)
        try:
            return read_key(path, cure="remove it to have a new one made, and restart the service", owner=self.owner)
        except FileNotFoundError:
            raise StoreError(f"{service} has no API key yet: {path} is made when it is first submitted.") from None

    def forget(self, service: str, job_ids: Set[str]) -> None:
        """Remove what is written about jobs that are over, not their logs. Raises StoreError.

        An empty file stays for each, so that nobody shows the job again while Slurm lists it.
        """
        folder, found = self.ensure_service(service), self.read(service)
        for job_id in job_ids:
            write_private(folder / forgotten_file_name(job_id), "")
        records = [record for record in found.records if record.job_id in job_ids]
        submitted = [job for job in found.submitted if job.job_id in job_ids]
        removed = [(folder / one.name).with_suffix(ending) for one in records for ending in (".json", ".preflight")]
        removed += [folder / "submitted" / job.name for job in submitted]
        for path in removed:
            remove_file(path)

    def is_forgotten(self, service: str, job_id: str) -> bool:
        """Return whether `forget` was told of a job lately."""
        return (self.service_dir(service) / forgotten_file_name(job_id)).exists()

    def sweep(self, service: str, *, is_over: Callable[[JobEntry], bool] | None = None) -> int:
        """Remove old files of a service, and return their number.

        These are records that were not renewed for a week, temporary files of dead writers, and requests to
        drain that nobody took back. Files about successors, preflights and forgotten jobs are removed too. A submitted
        job of that age is removed only if `is_over` says so: it may still wait in the queue. Raises StoreError.
        """
        oldest = time.time() - WEEK_S
        folder = self.service_dir(service)
        found = self.read(service)
        removed = [folder / record.name for record in found.records if record.updated_at < oldest]
        waiting = found.awaiting_record()
        removed += [
            folder / "submitted" / job.name
            for job in found.submitted
            if job.submitted_at < oldest and (is_over(job) if is_over else job not in waiting)
        ]
        removed += [
            parent / name
            for parent in (folder, folder / "submitted")
            for name, (modified_ns, *_) in list_newest_first(parent)
            if modified_ns < oldest * 1e9
            and (name.endswith(_BESIDE_RECORDS) or (name.startswith(".") and name.endswith(".tmp")))
        ]
        for path in removed:
            remove_file(path)
        return len(removed)


def own_store() -> ServiceStore:
    """Return the store of this process's home. Raises StoreError."""
    return ServiceStore(default_home(os.environ))


# -- requests to drain

# slurm: before the time limit or a preemption. handover: another replica has taken over. stop: a person ends it.
# surplus: it is not needed. unknown: the file is there and cannot be read, for example as the disk was full.
DrainCause = Literal["slurm", "handover", "stop", "surplus", "unknown"]
_UNKNOWN_S = 100.0  # what the batch script leaves of a notice of two minutes


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """A request to drain: its author, its cause, and the seconds that requests under way may take; 0 ends at once.

    The batch script writes no cause: it asks when Slurm does. `requested_at` is seconds since the epoch by the author's
    clock. The head counts by its own clock.
    """

    by: str
    deadline_s: float
    requested_at: float | None = field(default=None, metadata=MAY_BE_MISSING)
    cause: DrainCause = field(default="slurm", metadata=MAY_BE_MISSING)


def drain_file(store: ServiceStore, service: str, record_name: str) -> Path:
    """Return the path of a request to drain the replica of a record. Raises InvalidRequestError for a wrong service."""
    return store.beside_record(service, record_name, ".drain")


def ask_to_drain(path: Path, request: DrainRequest) -> None:
    """Ask the replica of `path`; a later request takes the place of an earlier one. Raises StoreError."""
    write_json(path, request)


def read_drain_request(path: Path) -> DrainRequest | None:
    """Return what is asked; None if nothing is, if the folder cannot be read now, or if it is not ours.

    A file that is empty or damaged asks for a drain, too: its writer died, or had no room on the disk.
    """
    try:
        text = read_private(path)
    except (FileNotFoundError, StoreError, RecordError):  # or others may have written it
        return None
    try:
        request = from_json_text(DrainRequest, text, source=str(path))
    except RecordError as error:
        return DrainRequest(by=f"an unreadable request ({error})", cause="unknown", deadline_s=_UNKNOWN_S)
    return replace(request, deadline_s=max(0.0, request.deadline_s))


# -- the report of a preflight

Level = Literal["ok", "not checked", "warning", "failed"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the best to the worst."""
_NODES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One check over all nodes: the worst that was seen, and on which nodes. `took_s` is that of the slowest node."""

    check: str
    level: Level
    nodes: tuple[str, ...]
    seen: str
    cure: str = ""
    took_s: float = 0.0

    @property
    def where(self) -> str:
        more = len(self.nodes) - _NODES_SHOWN
        return ", ".join(self.nodes[:_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    @property
    def sentence(self) -> str:
        """For a log or a record. `diagnose` has a rule that reads it."""
        cure = f" To do: {self.cure}" if self.cure else ""
        return f"preflight check {self.check}: {self.level} on {self.where}: {self.seen}.{cure}"


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """All verdicts of a run, in the order of the checks. `began_at` is in seconds since the epoch."""

    verdicts: tuple[Verdict, ...]
    num_nodes: int
    took_s: float
    began_at: Timestamp = 0.0

    def of_level(self, level: Level) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.level == level)

    @property
    def summary(self) -> str:
        """Return one line: how many checks had which result."""
        counts = [(level, len(self.of_level(level))) for level in reversed(LEVELS)]
        words = ", ".join(f"{count} {level}" for level, count in counts if count)
        return f"preflight of {number_of(self.num_nodes, 'node')} in {self.took_s:.1f} s: {words}"


def preflight_file(store: ServiceStore, service: str, record_name: str) -> Path:
    """Return the path of the report of a record's replica. Raises InvalidRequestError for a wrong service."""
    return store.beside_record(service, record_name, ".preflight")


def read_preflight(path: Path) -> PreflightReport | None:
    """Return the report, as far as it can be read, for those who show it."""
    try:
        return read_json(PreflightReport, path)
    except (FileNotFoundError, StoreError, RecordError):
        return None
