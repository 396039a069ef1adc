"""Dataclasses as JSON objects. The type hints of a dataclass say what its fields may hold. Any other content is
refused, with the name of the file and of the field, because anybody may have written the file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_serve.errors import RecordError
from hpc_serve.printable import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

_LARGEST = 2**63 - 1
_LONGEST_SHOWN = 60

# Metadata of a field that files of earlier versions lack: its default stands in. All other fields must be there.
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
    return _read_object(kind, values, source, "")


@dataclass(frozen=True, kw_only=True)
class _FieldType:
    """One type of field: `wanted` and `plural` name it in errors, `fits` checks a value, `read` converts one that fits.

    `read` is given the value, the source, and the path of the field.
    """

    wanted: str
    plural: str
    fits: Callable[[Any], bool]
    read: Callable[[Any, str, str], Any] = lambda value, source, path: value


def _read_object(kind: type[T], values: Mapping[str, Any], source: str, prefix: str) -> T:
    found = {}
    for name, field_type, may_be_missing in field_types(kind):
        path = prefix + name
        if name in values:
            value = values[name]
            if not field_type.fits(value):
                raise RecordError(f"{source}: {path} is {_shown(value)}, not {field_type.wanted}.")
            found[name] = field_type.read(value, source, path)
        elif not may_be_missing:
            raise RecordError(f"{source} has no field {path}: it is half-written or not ours; remove it.")
    return kind(**found)


@functools.cache
def field_types(kind: type[DataclassInstance]) -> tuple[tuple[str, _FieldType, bool], ...]:
    """Name, type, and whether it may be missing, of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (field.name, _field_type(hints[field.name]), "may_be_missing" in field.metadata) for field in fields(kind)
    )


def _field_type(hint: Any) -> _FieldType:
    """Return how to read a field of that type hint. Raises TypeError for a hint that records do not use."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is str:
        return _FieldType(
            wanted="a text",
            plural="texts",
            fits=lambda value: isinstance(value, str),
            read=lambda value, source, path: printable(value),
        )
    if hint is bool:
        return _FieldType(
            wanted="true or false", plural="any of true and false", fits=lambda value: type(value) is bool
        )
    if hint is int:
        return _integer(Bounds())
    if hint is float:
        return _FieldType(
            wanted="a number", plural="numbers", fits=_is_number, read=lambda value, source, path: float(value)
        )
    if hint == Timestamp:
        return _FieldType(
            wanted="a time in seconds since 1970",
            plural="times",
            fits=lambda value: _is_number(value) and 0 <= value <= _LAST_TIMESTAMP,
            read=lambda value, source, path: float(value),
        )
    if origin is Annotated and arguments[0] is int:
        return _integer(arguments[1])
    if origin is Literal:
        choices = ", ".join(arguments)
        return _FieldType(wanted=f"one of {choices}", plural=f"any of {choices}", fits=lambda value: value in arguments)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        return _optional(_field_type(next(argument for argument in arguments if argument is not NoneType)))
    if origin is tuple and arguments[1:] == (...,):
        return _list_of(_field_type(arguments[0]))
    if origin is Mapping and arguments[0] is str:
        return _object_of(_field_type(arguments[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return _FieldType(
            wanted="an object",
            plural="objects",
            fits=lambda value: isinstance(value, dict),
            read=lambda value, source, path: _read_object(hint, value, source, f"{path}."),
        )
    raise TypeError(f"fields of type {hint} cannot be read from JSON")


def _integer(bounds: Bounds) -> _FieldType:
    return _FieldType(
        wanted=bounds.words,
        plural="whole numbers",
        fits=lambda value: type(value) is int and bounds.least <= value <= bounds.most,
    )


def _optional(inner: _FieldType) -> _FieldType:
    return _FieldType(
        wanted=f"{inner.wanted} or null",
        plural=f"{inner.plural} or nulls",
        fits=lambda value: value is None or inner.fits(value),
        read=lambda value, source, path: None if value is None else inner.read(value, source, path),
    )


def _list_of(item: _FieldType) -> _FieldType:
    return _FieldType(
        wanted=f"a list of {item.plural}",
        plural=f"lists of {item.plural}",
        fits=lambda value: isinstance(value, list) and all(map(item.fits, value)),
        read=lambda value, source, path: tuple(
            item.read(each, source, f"{path}[{place}]") for place, each in enumerate(value)
        ),
    )


def _object_of(item: _FieldType) -> _FieldType:
    return _FieldType(
        wanted=f"an object of {item.plural}",
        plural=f"objects of {item.plural}",
        fits=lambda value: isinstance(value, dict) and all(map(item.fits, value.values())),
        read=lambda value, source, path: {
            printable(name): item.read(each, source, f"{path}.{name}") for name, each in value.items()
        },
    )


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is float and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
