"""Checks the fields of a Hugging Face config before anything is calculated with them.

Anybody can write a config. A zero among the sizes, or text in place of a number, is an error that names the field. A
field that is null counts as missing. A field that is not in catalog/config_fields.json stays unchanged. A config
remembers which of its fields were read, so config_keys.py can name the fields that nobody has read.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import config_fields

_LARGEST = 2**40
_MOST_LAYERS = 2_000
"""Ten times as many as any model has. A plan for more would take longer than a second."""
_MOST_FIELDS = 10_000
_DEEPEST = 8
"""Objects within objects. Published configs have four."""

_OBJECTS_OF_OBJECTS = "config_groups."
_Predicate: TypeAlias = Callable[[Any], bool]


class CheckedConfig(dict[str, Any]):
    """A config, or an object in it, with its listed fields checked and its nulls removed.

    `config[name]` raises InvalidRequestError where the field is missing. `read` holds the fields that `config[name]`
    and `get` were asked for, with the names of the objects that they lie in.
    """

    def __init__(self, config: Mapping[str, Any], *, path: str = "", read: set[str] | None = None) -> None:
        super().__init__()
        self.path = path
        self.read: set[str] = set() if read is None else read
        if path.count(".") > _DEEPEST:
            raise InvalidRequestError(f"The config has objects within objects, more than {_DEEPEST} deep: {path[:60]}.")
        if len(config) > _MOST_FIELDS:
            raise InvalidRequestError(f"The config has {len(config):,} fields: at most {_MOST_FIELDS:,} are read.")
        for name, value in config.items():
            if value is not None:
                self[str(name)] = self._checked(str(name), value)

    def __missing__(self, name: str) -> Any:
        raise missing(f"{self.path}{name}")

    def __getitem__(self, name: str) -> Any:
        self.read.add(self.path + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(self.path + name)
        return super().get(name, default)

    def peek(self, name: str, default: Any = None) -> Any:
        """Return the field as `get` has it, which does not count as read."""
        return super().get(name, default)

    def ignore(self, name: str) -> None:
        """Leave the field out, as if it were not there."""
        self.pop(name, None)

    def _checked(self, name: str, value: Any) -> Any:
        kind = "object" if self.path.endswith(_OBJECTS_OF_OBJECTS) else _kinds().get(name)
        if kind is None:
            return value
        is_right, wanted = _RULES[kind]
        if not is_right(value):
            raise InvalidRequestError(f"The config's {self.path}{name} is {_shown(value)}: it must be {wanted}.")
        if kind == "object":
            return CheckedConfig(value, path=f"{self.path}{name}.", read=self.read)
        if kind == "list_of_objects":
            inside = f"{self.path}{name}"
            return [CheckedConfig(one, path=f"{inside}[{index}].", read=self.read) for index, one in enumerate(value)]
        return value


@lru_cache(maxsize=1)
def _kinds() -> Mapping[str, str]:
    """Return the kind of each field that is checked."""
    return {name: kind for kind, names in config_fields()["checked"].items() for name in names}


def _shown(value: Any) -> str:
    """Return the value in at most 40 characters."""
    text = reprlib.repr(value) if isinstance(value, (list, tuple, Mapping)) or type(value) is int else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def missing(field: str) -> InvalidRequestError:
    """Return the error for a missing field that is needed."""
    return InvalidRequestError(f"The config has no {field!r}, without which the model's size is unknown.")


def _whole(least: int, most: int = _LARGEST) -> _Predicate:
    return lambda value: type(value) is int and least <= value <= most


def _of(*types: type) -> _Predicate:
    return lambda value: isinstance(value, types)


def _list_of(is_right: _Predicate, *, most: int = _MOST_FIELDS) -> _Predicate:
    return lambda value: isinstance(value, (list, tuple)) and len(value) <= most and all(map(is_right, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _LARGEST and math.isfinite(value)


def _is_enumeration(value: Any) -> bool:
    numbers = value.split(",") if isinstance(value, str) else []
    return 0 < len(numbers) <= _MOST_FIELDS and all(one.isdecimal() and len(one) <= 5 for one in numbers)


def _any(*rules: _Predicate) -> _Predicate:
    return lambda value: any(is_right(value) for is_right in rules)


_RULES: dict[str, tuple[_Predicate, str]] = {
    "layers": (_whole(1, _MOST_LAYERS), f"a whole number from 1 to {_MOST_LAYERS:,}"),
    "at_least_one": (_whole(1), "a whole number of at least 1"),
    "at_least_zero": (_whole(0), "a whole number, not negative"),
    "group_size": (_whole(-1), "a whole number, or -1"),
    "number": (_is_number, "a number above 0"),
    "list": (_of(list, tuple), "a list"),
    "pair": (lambda value: _list_of(_whole(1))(value) and len(value) == 2, "two whole numbers of at least 1"),
    "list_of_numbers": (_list_of(_whole(0)), f"a list of whole numbers, at most {_MOST_FIELDS:,}"),
    "list_of_texts": (_list_of(_of(str), most=_LARGEST), "a list of texts"),
    "object": (_of(Mapping), "an object"),
    "list_of_objects": (_list_of(_of(Mapping)), f"a list of objects, at most {_MOST_FIELDS:,}"),
    "pattern": (_any(_whole(1), _of(str)), "a whole number of at least 1, or a text"),
    "every": (_any(_whole(1), _list_of(_whole(0, 1))), "a whole number of at least 1, or a list of 0 and 1"),
    "text": (_of(str), "a text"),
    "flag": (lambda value: value in (False, True), "true or false"),
    "flag_or_text": (_of(bool, str), "true, false or a text"),
    "enumeration": (_is_enumeration, "numbers of layers, with commas between them"),
}
"""The rule of each kind of field in catalog/config_fields.json: what is right, and what must be there."""
