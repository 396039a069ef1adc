"""Names of services, jobs and records, which become names of files. Pure: this decides what a name may look like."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_serve.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LOG_PATTERN = re.compile(r"%([xujAa])")
_NO_TASK = "4294967294"  # of a job that is no array, as Slurm writes it
_RECORD_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}-r\d{1,9}-\d{1,9}\.json")


def is_service_name(name: str) -> bool:
    """Return whether `name` can name a service: its folder and its jobs."""
    return _NAME.fullmatch(name) is not None


def validate_service_name(service: str) -> str:
    """Return `service` if it can name a service. Raises InvalidRequestError."""
    if not is_service_name(service):
        of_another = (
            "the path of a service that another user shares is for connect(), `chat`, `status` and `gateway`; else "
            if service.startswith("/")
            else ""
        )
        raise InvalidRequestError(
            f"{service!r} cannot name a service: {of_another}use 1 to 63 letters, digits, dots, dashes and "
            "underscores, the first a letter or digit (for example 405b or llama-70b.test)."
        )
    return service


def validate_job_id(job_id: str) -> str:
    """Return `job_id` if it can be part of a file's name. Raises InvalidRequestError.

    >>> validate_job_id("123_4")
    '123_4'
    """
    if not _NAME.fullmatch(job_id):
        raise InvalidRequestError(f"{job_id!r} is no job id: it should look like 123 or 123_4 (Slurm's) or local-4567.")
    return job_id


def array_of(job_id: str) -> str:
    """Return the array that a task belongs to; of any other job its own id.

    >>> array_of("123_4"), array_of("123")
    ('123', '123')
    """
    return job_id.partition("_")[0]


def check_log_path(path: str, called: str) -> None:
    """Raises InvalidRequestError for a log folder with a name that Slurm would read as a pattern.

    `--output` of sbatch and srun expand %N, %t and others, and take a backslash to end that.
    """
    if "%" in path or "\\" in path:
        raise InvalidRequestError(
            f"{called} is {path!r}: of Slurm's patterns a folder may have %x, %u, %j, %A and %a, and no \\. The others "
            "differ from node to node. The files in it are named after the job's id and the node."
        )


def expanded_log_dir(path: str, environ: Mapping[str, str], *, service: str, job_id: str) -> str:
    """Return a log folder with %x, %u, %j, %A and %a replaced as Slurm does; `environ` is that of the job.

    Raises InvalidRequestError for any other pattern.

    >>> expanded_log_dir("/logs/%x_%j", {"SLURM_JOB_NAME": "hpc-serve-8b"}, service="8b", job_id="7")
    '/logs/hpc-serve-8b_7'
    """
    values = {
        "x": environ.get("SLURM_JOB_NAME", service),
        "u": environ.get("USER", ""),
        "j": environ.get("SLURM_JOB_ID", job_id),
        "A": environ.get("SLURM_ARRAY_JOB_ID", job_id),
        "a": environ.get("SLURM_ARRAY_TASK_ID", _NO_TASK),
    }
    expanded = _LOG_PATTERN.sub(lambda found: values[found[1]], path)
    check_log_path(expanded, "log-dir")
    return expanded


def log_dir_before_job(path: str) -> str:
    """Return the part of a log folder that is known before there is a job: above the first folder with a pattern.

    >>> log_dir_before_job("/logs/%x/%j"), log_dir_before_job("/logs")
    ('/logs', '/logs')
    """
    return path.partition("%")[0].rpartition("/")[0] or "/" if "%" in path else path


def record_file_name(job_id: str, restart: int, replica: int) -> str:
    """Return the file of one replica of one run of a job.

    >>> record_file_name("123_4", 1, 0)
    '123_4-r1-0.json'
    """
    return f"{validate_job_id(job_id)}-r{restart}-{replica}.json"


def run_name(job_id: str, restart: int, replica: int) -> str:
    """Return the name of one replica's run of a job; the first replica's is that of a job with one replica.

    >>> run_name("123_4", 1, 0), run_name("123_4", 1, 2)
    ('123_4-r1', '123_4-r1-2')
    """
    return f"{job_id}-r{restart}" + (f"-{replica}" if replica else "")


def replica_name(job_id: str, replica: int, replicas_per_job: int) -> str:
    """Return a replica's name for people: its job's id, and its number if the job has several.

    >>> replica_name("123_4", 0, 1), replica_name("123_4", 2, 4)
    ('123_4', '123_4-2')
    """
    return job_id if replicas_per_job == 1 else f"{job_id}-{replica}"


def forgotten_file_name(job_id: str) -> str:
    """Return the name of the file that says that a job is not to be shown any more. An id may be Slurm's `9_[0-2]`.

    >>> forgotten_file_name("123_4")
    '123_4.forgotten'
    """
    return f"{job_id.replace('/', '_')}.forgotten"


def is_record_file_name(name: str) -> bool:
    """Return whether a file of that name in a service's folder is a record."""
    return _RECORD_FILE.fullmatch(name) is not None
