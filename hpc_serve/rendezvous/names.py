"""Names of services, jobs and records, which become names of files. Pure: this decides what a name may look like."""

from __future__ import annotations

import re

from hpc_serve.errors import InvalidRequestError

_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RECORD_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}-r\d{1,9}-\d{1,9}\.json")


def is_service_name(name: str) -> bool:
    """Whether `name` can name a service: its folder and its jobs."""
    return _SERVICE.fullmatch(name) is not None


def validate_service_name(service: str) -> str:
    """Return `service` if it can name a service. Raises InvalidRequestError."""
    if not is_service_name(service):
        raise InvalidRequestError(
            f"{service!r} cannot name a service: use 1 to 63 letters, digits, dots, dashes and underscores, "
            "the first a letter or digit (for example 405b or llama-70b.test)."
        )
    return service


def validate_job_id(job_id: str) -> str:
    """Return `job_id` if it can be part of a file's name. Raises InvalidRequestError.

    >>> validate_job_id("123_4")
    '123_4'
    """
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidRequestError(f"{job_id!r} is no job id: it should look like 123 or 123_4 (Slurm's) or local-4567.")
    return job_id


def array_of(job_id: str) -> str:
    """The array that a task belongs to; of any other job its own id.

    >>> array_of("123_4"), array_of("123")
    ('123', '123')
    """
    return job_id.partition("_")[0]


def check_log_path(path: str, called: str) -> None:
    """Raises InvalidRequestError for a log folder whose name Slurm would read as a pattern.

    `--output` of sbatch and srun expand %x, %j and others, and take a backslash to end that. The folder is made before
    there is a job, under the name as it is written, so the two would differ.
    """
    if "%" in path or "\\" in path:
        raise InvalidRequestError(
            f"{called} is {path!r}: Slurm would expand the % (or \\) in it for each job, but the folder is made before "
            "there is a job. Use a folder without them; the files in it are named after the job's id."
        )


def record_file_name(job_id: str, restart: int, replica: int) -> str:
    """The file of one replica of one run of a job.

    >>> record_file_name("123_4", 1, 0)
    '123_4-r1-0.json'
    """
    return f"{validate_job_id(job_id)}-r{restart}-{replica}.json"


def run_name(job_id: str, restart: int, replica: int) -> str:
    """The name of one replica's run of a job; the first replica's is that of a job with one replica.

    >>> run_name("123_4", 1, 0), run_name("123_4", 1, 2)
    ('123_4-r1', '123_4-r1-2')
    """
    return f"{job_id}-r{restart}" + (f"-{replica}" if replica else "")


def replica_name(job_id: str, replica: int, replicas_per_job: int) -> str:
    """What people call a replica: its job's id, and its number in a job of several.

    >>> replica_name("123_4", 0, 1), replica_name("123_4", 2, 4)
    ('123_4', '123_4-2')
    """
    return job_id if replicas_per_job == 1 else f"{job_id}-{replica}"


def drain_file_name(job_id: str, restart: int, replica: int) -> str:
    """The file in which that replica is asked to drain.

    >>> drain_file_name("123_4", 1, 0)
    '123_4-r1-0.drain'
    """
    return record_file_name(job_id, restart, replica).removesuffix(".json") + ".drain"


def preflight_file_name(job_id: str, restart: int, replica: int) -> str:
    """The file with the report of that replica's preflight.

    >>> preflight_file_name("123_4", 1, 0)
    '123_4-r1-0.preflight'
    """
    return record_file_name(job_id, restart, replica).removesuffix(".json") + ".preflight"


def successor_file_name(job_id: str, replica: int) -> str:
    """The file that says which job takes over from that replica. It is one for all runs of a job.

    >>> successor_file_name("123_4", 0)
    '123_4-0.successor'
    """
    return f"{validate_job_id(job_id)}-{replica}.successor"


def forgotten_file_name(job_id: str) -> str:
    """Return the name of the file that says that a job is not to be shown any more. An id may be Slurm's `9_[0-2]`.

    >>> forgotten_file_name("123_4")
    '123_4.forgotten'
    """
    return f"{job_id.replace('/', '_')}.forgotten"


def is_record_file_name(name: str) -> bool:
    """Whether a file of that name in a service's folder is a record."""
    return _RECORD_FILE.fullmatch(name) is not None
