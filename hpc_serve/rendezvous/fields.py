"""Typed reading of a JSON object from a file that anything may have written: each field is there and of its kind, or
a RecordError names the file and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc_serve.errors import RecordError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_INTEGER = 2**63 - 1


def to_json_text(value: DataclassInstance) -> str:
    """A dataclass as one JSON object on indented lines, for people who look. Raises ValueError for NaN and infinity."""
    return json.dumps(asdict(value), indent=1, allow_nan=False) + "\n"


class FieldReader:
    """Reads the fields of one object; `source` and `path` say where it stands, for the error's text."""

    def __init__(self, fields: Mapping[str, Any], source: str, path: str = "") -> None:
        self._fields = fields
        self._source = source
        self._path = path

    @classmethod
    def parse(cls, text: str, source: str) -> FieldReader:
        """Raises RecordError when `text` is not one JSON object."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{source} is not JSON ({error}): it may be half-written; remove it.") from None
        if not isinstance(fields, dict):
            raise RecordError(f"{source} holds a {type(fields).__name__}, not an object; remove it.")
        return cls(fields, source)

    def has(self, name: str) -> bool:
        return name in self._fields

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._get(name) is None else self.text(name)

    def choice(self, name: str, choices: Collection[str]) -> str:
        value = self.text(name)
        if value not in choices:
            raise self._wrong(name, f"one of {', '.join(choices)}")
        return value

    def integer(self, name: str, *, at_most: int = _MAX_INTEGER) -> int:
        """A whole number from 0 to `at_most`."""
        value = self._get(name)
        if type(value) is not int or not 0 <= value <= at_most:
            raise self._wrong(name, f"a whole number from 0 to {at_most}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number of either sign, or null."""
        value = self._get(name)
        if value is not None and (type(value) is not int or abs(value) > _MAX_INTEGER):
            raise self._wrong(name, "a whole number or null")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if not _is_number(value):
            raise self._wrong(name, "a number")
        return float(value)

    def numbers(self, name: str) -> dict[str, float]:
        """An object whose values are numbers."""
        value = self._get(name)
        if not isinstance(value, dict) or not all(map(_is_number, value.values())):
            raise self._wrong(name, "an object of numbers")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def objects(self, name: str) -> tuple[FieldReader, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(name, "a list of objects")
        return tuple(
            FieldReader(item, self._source, f"{self._path}{name}[{place}].") for place, item in enumerate(value)
        )

    def optional_object(self, name: str) -> FieldReader | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object or null")
        return FieldReader(value, self._source, f"{self._path}{name}.")

    def _get(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise RecordError(
                f"{self._source} has no field {self._path}{name}: it is half-written or not ours; remove it."
            ) from None

    def _wrong(self, name: str, wanted: str) -> RecordError:
        value = repr(self._fields[name])
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return RecordError(f"{self._source}: {self._path}{name} is {shown}, not {wanted}.")


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _MAX_INTEGER
    return type(value) is float and math.isfinite(value)
