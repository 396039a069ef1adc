"""The entries of a service: its records and its submitted jobs, read from their files and put in order.

An entry that is not trusted becomes a problem with a reason. store.py says where the files are.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.fields import from_json_text
from hpc_serve.rendezvous.files import FileVersion, check_folder, list_folder, list_newest_first, read_private
from hpc_serve.rendezvous.names import array_of, is_record_file_name
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


def began_or_ended_at(record: EndpointRecord) -> tuple[float, str]:
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
        begun = jobs_begun(name.rpartition("-r")[0] for name in names) if self._passes_over_ended else frozenset()
        ours = self._owner is None
        submitted = read_submitted(self._folder, self._service, problems, without=begun) if ours else []
        return ServiceRecords(
            service=self._service,
            records=tuple(sorted(records, key=began_or_ended_at)),
            submitted=tuple(sorted(submitted, key=lambda job: (job.submitted_at, job.job_id))),
            problems=tuple(problems),
            unreadable=frozenset(names - self._ended.keys() - {record.name for record in records}),
        )
