"""The entries of a service: its records and its submitted jobs, read from their files and put in order.

An entry that is not trusted becomes a problem with a reason. store.py says where the files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.files import list_folder, read_private
from hpc_serve.rendezvous.names import array_of
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob

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
        started = jobs_begun(record.job_id for record in self.records)
        return tuple(job for job in self.submitted if job.job_id not in started)

    def awaiting_record(self) -> tuple[SubmittedJob, ...]:
        """Return submitted jobs without a record and without a known end; the scheduler may know that they ended."""
        return tuple(job for job in self.without_record() if job.end is None)


def jobs_begun(job_ids: Iterable[str]) -> set[str]:
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


def in_order(
    service: str,
    records: Sequence[EndpointRecord],
    submitted: Sequence[SubmittedJob],
    problems: Sequence[str],
    *,
    seen: Iterable[str],
) -> ServiceRecords:
    """Return the entries of a service, oldest first. `seen` are the names of the existing records that count."""
    return ServiceRecords(
        service=service,
        records=tuple(sorted(records, key=began_or_ended_at)),
        submitted=tuple(sorted(submitted, key=lambda job: (job.submitted_at, job.job_id))),
        problems=tuple(problems),
        unreadable=frozenset(seen) - {record.name for record in records},
    )


def began_or_ended_at(record: EndpointRecord) -> tuple[float, str]:
    """When a replica began or, if it is over, when it ended; and its name, for replicas of the same moment."""
    return record.updated_at if record.is_final else record.started_at, record.name


def read_entry(path: Path, kind: type[_Entry], service: str, problems: list[str]) -> _Entry | None:
    """Read a record or a submitted job; None if it is gone or not trusted. `problems` gets the reason."""
    try:
        return parse_entry(read_private(path), path, kind, service)
    except FileNotFoundError:  # listed from a stale cache, or swept a moment ago
        return None
    except HpcServeError as error:
        problems.append(str(error))
        return None


def parse_entry(text: str, path: Path, kind: type[_Entry], service: str) -> _Entry:
    """Parse the text of an entry's file. Raises RecordError."""
    entry = kind.from_json(text, source=str(path))
    if entry.service != service or entry.name != path.name:
        raise RecordError(f"{path} says it is {entry.name} of {entry.service}: it was copied; remove it.")
    return entry
