"""Dataclasses from JSON by their type hints."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from hpc_serve.errors import RecordError
from hpc_serve.rendezvous.fields import MAY_BE_MISSING, Bounds, SignedInt, from_json_text, to_json_text


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: float | None


@dataclass(frozen=True, kw_only=True)
class Thing:
    kind: Literal["small", "large"]
    count: int
    level: Annotated[int, Bounds(1, 3)]
    offset: SignedInt
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part]
    grid: tuple[tuple[int, ...], ...] = ()
    note: str | None = field(default="none", metadata=MAY_BE_MISSING)


THING = Thing(
    kind="small",
    count=0,
    level=3,
    offset=-5,
    parts=(Part(name="a", size=None), Part(name="b", size=1.5)),
    by_name={"c": Part(name="c", size=2.0)},
    grid=((1, 2), ()),
)


def read(**changes):
    return from_json_text(Thing, json.dumps({**json.loads(to_json_text(THING)), **changes}), source="x.json")


def test_what_is_written_is_read():
    assert read() == THING


def test_only_a_field_that_says_so_may_be_missing():
    values = json.loads(to_json_text(THING))
    del values["note"]
    assert from_json_text(Thing, json.dumps(values), source="x.json") == THING
    del values["grid"]
    with pytest.raises(RecordError, match=r"x\.json has no field grid:"):
        from_json_text(Thing, json.dumps(values), source="x.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "huge"}, "kind is 'huge', not one of small, large"),
        ({"count": -1}, "count is -1, not a whole number from 0 to 9223372036854775807"),
        ({"count": True}, "count is True, not a whole number"),
        ({"count": 1.0}, "count is 1.0, not a whole number"),
        ({"count": 10**30}, "not a whole number"),
        ({"count": "x" * 10_000}, "..., not a whole number"),
        ({"kind": ["small"]}, "kind is ['small'], not one of small, large"),
        ({"parts": [{"name": None, "size": 1}]}, "parts[0].name is None, not a text"),
        ({"parts": [{"name": "a", "size": 10**400}]}, "not a number"),
        ({"level": 4}, "level is 4, not a whole number from 1 to 3"),
        ({"offset": 0.5}, "offset is 0.5, not a whole number."),
        ({"offset": -(2**63)}, "offset is -9223372036854775808, not a whole number."),
        ({"parts": {}}, "parts is {}, not a list, each an object"),
        ({"parts": [1]}, "parts[0] is 1, not an object"),
        ({"parts": [{"name": "a"}]}, "has no field parts[0].size:"),
        ({"parts": [{"name": "a", "size": "1"}]}, "parts[0].size is '1', not a number"),
        ({"by_name": {"c": {"name": 1, "size": 1}}}, "by_name.c.name is 1, not a text"),
        ({"by_name": None}, "by_name is None, not an object, each an object"),
        ({"grid": [[1], [-1]]}, "grid[1][0] is -1, not a whole number from 0"),
        ({"note": 1}, "note is 1, not a text"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_path_of_its_field(changes, words):
    with pytest.raises(RecordError) as refusal:
        read(**changes)
    assert str(refusal.value).startswith("x.json")
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "NaN", "[" * 100_000, '{"kind": NaN}'])
def test_what_is_no_object_of_json_is_refused(text):
    with pytest.raises(RecordError, match=r"^x\.json"):
        from_json_text(Thing, text, source="x.json")


@pytest.mark.parametrize(("size", "written"), [(math.nan, "NaN"), (math.inf, "Infinity")])
def test_what_json_cannot_say_is_neither_written_nor_read(size, written):
    with pytest.raises(ValueError, match="JSON"):
        to_json_text(Part(name="a", size=size))
    with pytest.raises(RecordError, match="size"):
        from_json_text(Part, f'{{"name": "a", "size": {written}}}', source="x.json")


def test_a_type_that_json_does_not_have_is_an_error_of_ours():
    @dataclass(frozen=True)
    class Odd:
        value: bytes

    with pytest.raises(TypeError, match="bytes"):
        from_json_text(Odd, "{}", source="x.json")
