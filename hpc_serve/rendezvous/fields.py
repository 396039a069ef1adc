"""Dataclasses as JSON objects, and the names of services, jobs and records that become names of files. Pure.

The type hints of a dataclass say what its fields may hold. Any other content is refused, with the name of the file and
of the field, because anybody may have written the file.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_serve.errors import InvalidRequestError, RecordError
from hpc_serve.printable import printable

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
            "the path of a service that another user shares ends in /services/NAME, and is for connect(), `chat`, "
            "`status` and `gateway`; else "
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


def host_and_port(host: str, port: int) -> str:
    """Return an address as a URL has it.

    >>> host_and_port("node7", 8000), host_and_port("::1", 8000)
    ('node7:8000', '[::1]:8000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def forgotten_file_name(job_id: str) -> str:
    """Return the name of the file that says that a job is not to be shown any more. An id may be Slurm's `9_[0-2]`.

    >>> forgotten_file_name("123_4")
    '123_4.forgotten'
    """
    return f"{job_id.replace('/', '_')}.forgotten"


def is_record_file_name(name: str) -> bool:
    """Return whether a file of that name in a service's folder is a record."""
    return _RECORD_FILE.fullmatch(name) is not None


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

_LARGEST = 2**63 - 1
_LONGEST_SHOWN = 60

# Metadata of a field that a writer may leave out: its default stands in. All other fields must be there.
MAY_BE_MISSING: Mapping[str, Any] = {"may_be_missing": True}


@dataclass(frozen=True)
class Bounds:
    """Limits of an integer field, as in `Annotated[int, Bounds(0, 65535)]`; a plain `int` is 0 or more."""

    least: int = 0
    most: int = _LARGEST

    @property
    def words(self) -> str:
        """Return how an error describes such a number."""
        is_unlimited = (self.least, self.most) == (-_LARGEST, _LARGEST)
        return "a whole number" if is_unlimited else f"a whole number from {self.least} to {self.most}"


SignedInt = Annotated[int, Bounds(-_LARGEST, _LARGEST)]
Timestamp = Annotated[float, "seconds since the epoch"]
"""A time that can be shown: before the year 10000."""
_LAST_TIMESTAMP = 253_402_300_799


def to_json_text(value: DataclassInstance) -> str:
    """A dataclass as one JSON object on indented lines, for people who look. Raises ValueError for NaN and infinity."""
    return json.dumps(asdict(value), indent=1, allow_nan=False) + "\n"


def from_json_text(kind: type[T], text: str, *, source: str) -> T:
    """Read a dataclass from one JSON object; unknown fields are ignored. Raises RecordError: `source` and field."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{source} is not JSON ({error}): it may be half-written; remove it.") from None
    if not isinstance(values, dict):
        raise RecordError(f"{source} holds a {type(values).__name__}, not an object; remove it.")
    try:
        return _read_object(kind, values, "")
    except _UnfitError as error:
        raise RecordError(f"{source}{error}") from None


class _UnfitError(Exception):
    """A field is missing or holds something else. The text goes on after the name of the file."""


@dataclass(frozen=True)
class FieldType:
    """One type of field: `wanted` names it in errors; `read` converts a value, given the path of the field."""

    wanted: str
    read: Callable[[Any, str], Any]


def _read_object(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    found = {}
    for name, field_type, may_be_missing in field_types(kind):
        if name in values:
            found[name] = field_type.read(values[name], prefix + name)
        elif not may_be_missing:
            raise _UnfitError(f" has no field {prefix}{name}: it is half-written or not ours; remove it.")
    return kind(**found)


@functools.cache
def field_types(kind: type[DataclassInstance]) -> tuple[tuple[str, FieldType, bool], ...]:
    """Name, type, and whether it may be missing, of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (field.name, _field_type(hints[field.name]), "may_be_missing" in field.metadata) for field in fields(kind)
    )


def _field_type(hint: Any) -> FieldType:
    """Return how to read a field of that type hint. Raises TypeError for a hint that records do not use."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is str:
        return _checked("a text", lambda value: isinstance(value, str), lambda value, _: printable(value))
    if hint is bool:
        return _checked("true or false", lambda value: type(value) is bool)
    if hint is float:
        return _checked("a number", _is_number, lambda value, _: float(value))
    if hint == Timestamp:
        is_time = lambda value: _is_number(value) and 0 <= value <= _LAST_TIMESTAMP  # noqa: E731
        return _checked("a time in seconds since 1970", is_time, lambda value, _: float(value))
    if hint is int or (origin is Annotated and arguments[0] is int):
        bounds = arguments[1] if arguments else Bounds()
        return _checked(bounds.words, lambda value: type(value) is int and bounds.least <= value <= bounds.most)
    if origin is Literal:
        return _checked(f"one of {', '.join(arguments)}", lambda value: value in arguments)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        inner = _field_type(next(argument for argument in arguments if argument is not NoneType))
        read = lambda value, path: None if value is None else inner.read(value, path)  # noqa: E731
        return FieldType(f"{inner.wanted} or null", read)
    if origin is tuple and arguments[1:] == (...,):
        item = _field_type(arguments[0])
        return _checked(
            f"a list, each {item.wanted}",
            lambda value: isinstance(value, list),
            lambda value, path: tuple(item.read(one, f"{path}[{place}]") for place, one in enumerate(value)),
        )
    if origin is Mapping and arguments[0] is str:
        item = _field_type(arguments[1])
        return _checked(
            f"an object, each {item.wanted}",
            _is_object,
            lambda value, path: {printable(name): item.read(one, f"{path}.{name}") for name, one in value.items()},
        )
    if isinstance(hint, type) and is_dataclass(hint):
        return _checked("an object", _is_object, lambda value, path: _read_object(hint, value, f"{path}."))
    raise TypeError(f"fields of type {hint} cannot be read from JSON")


def _checked(
    wanted: str, fits: Callable[[Any], bool], convert: Callable[[Any, str], Any] = lambda value, path: value
) -> FieldType:
    """Return the type of values that fit; `convert` makes a value of a value of JSON and the path of its field."""

    def read(value: Any, path: str) -> Any:
        if not fits(value):
            raise _UnfitError(f": {path} is {_shown(value)}, not {wanted}.")
        return convert(value, path)

    return FieldType(wanted, read)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is float and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
