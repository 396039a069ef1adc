"""The shared folder of services: its files, their writers, and when they are removed.

Each record has one writer, so readers need no lock. The content of a file is a hint: the client probes whether an
engine answers, and only the scheduler knows whether a job exists. claims.py decides who may use a name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from hpc_serve.errors import StoreError
from hpc_serve.rendezvous.entries import EntryFiles, JobEntry, ServiceRecords
from hpc_serve.rendezvous.files import (
    check_folder,
    list_folder,
    list_newest_first,
    make_private_folder,
    remove_file,
    write_json,
    write_private,
)
from hpc_serve.rendezvous.key_file import make_key, read_key
from hpc_serve.rendezvous.names import forgotten_file_name, is_service_name, validate_service_name
from hpc_serve.rendezvous.record import EndpointRecord, SubmittedJob

WEEK_S = 7 * 24 * 3600.0
_BESIDE_RECORDS = (".drain", ".preflight", ".forgotten")

# A record that was not renewed for so long is over, whatever the clocks of its writer and its reader say.
ABANDONED_AFTER_S = 900.0


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

        If `makes_folders` is false, a home that was moved away is not made anew, and the error says that it is gone.
        """
        folder = self.service_dir(record.service)
        if makes_folders:
            self.ensure_service(record.service)
        else:
            self.require_service(record.service)
        write_json(folder / record.name, record.without_secrets(), is_shared=True)
        return folder / record.name

    def require_service(self, service: str) -> None:
        """Raise StoreError if the folder of a service is not there."""
        folder = self.service_dir(service)
        if not folder.is_dir():
            gone = folder if self.home.is_dir() else self.home
            raise StoreError(f"{gone} is gone: it was moved, removed or unmounted. Move it back.")

    def write_submitted(self, job: SubmittedJob) -> Path:
        """Write down that a job was handed to the scheduler, or how it ended before it began. Raises StoreError."""
        path = self.ensure_service(job.service) / "submitted" / job.name
        write_json(path, job)
        return path

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
