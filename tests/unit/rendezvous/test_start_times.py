"""What starts took is written down once and read by the next; a damaged file is as none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpc_serve.rendezvous.start_times import FILE, MOST_STARTS, PastStart, last_start, layout_of, remember_start
from tests.support.stubs import make_record

RECORD = make_record(service="8b", model="m", tensor_parallel_size=2, num_nodes=1, gpus_per_node=2)
TOOK_S = {"engine": 30.5, "weights": 60.0}
START = PastStart(service="8b", model="m", layout=layout_of(RECORD), ready_at=1.0, took_s=TOOK_S, read_bytes=15 * 2**30)


@pytest.fixture
def home(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_what_is_written_is_read_by_the_next_start(home):
    assert last_start(home / "none", RECORD) is None
    remember_start(home, START)
    assert last_start(home, RECORD) == START
    assert (home / FILE).stat().st_mode & 0o777 == 0o600


def past(service: str = "8b", cache: str = "", at: float = 1.0) -> PastStart:
    return replace(START, service=service, cache=cache, ready_at=at)


WARM, COLD = "warm, from /c on this node", "cold, kept in /c (empty)"


@pytest.mark.parametrize(
    ("known", "cache", "expected"),
    [
        ([past("other", at=9.0)], "", 0),
        ([past("other", at=9.0), past()], "", 1),
        ([past(), past("other", at=9.0), past(at=5.0)], "", 2),  # in the place of the one before
        ([past(cache="cold", at=9.0), past(cache="warm")], WARM, 1),
        ([past(cache="cold", at=9.0), past(cache="warm")], COLD, 0),
        ([past(cache="cold", at=9.0), past(cache="warm")], "", 0),
        ([past(cache="warm", at=9.0), past("other", cache="cold")], COLD, 1),
        ([past(cache="warm")], COLD, None),  # it compiled nothing
        ([past(cache="warm")], WARM, 0),
    ],
)
def test_as_warm_caches_count_most_then_the_service_then_the_time(home, known, cache, expected):
    for start in known:
        remember_start(home, start)
    assert last_start(home, replace(RECORD, cache=cache)) == (None if expected is None else known[expected])


@pytest.mark.parametrize(
    "changed", [{"model": "n"}, {"tensor_parallel_size": 4}, {"num_nodes": 2}, {"cluster": "local"}, {"stand_in": "/t"}]
)
def test_another_model_or_layout_is_another_start(home, changed):
    remember_start(home, START)
    assert last_start(home, replace(RECORD, **changed)) is None


def test_the_file_does_not_grow_without_end(home):
    for number in range(MOST_STARTS + 10):
        remember_start(home, replace(START, service=f"s{number}", ready_at=float(number)))
    starts = json.loads((home / FILE).read_text())["starts"]
    assert [start["service"] for start in starts] == [f"s{number}" for number in range(10, MOST_STARTS + 10)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"starts": 3}', '{"starts": [{"service": "8b"}]}', "[" * 100_000, "\x00"]
)
def test_a_damaged_file_is_as_none_and_is_replaced(home, text):
    (home / FILE).write_text(text)
    (home / FILE).chmod(0o600)
    assert last_start(home, RECORD) is None
    remember_start(home, START)
    assert last_start(home, RECORD) == START


@pytest.mark.parametrize("took_s", [{"engine": -1.0}, {"engine": 1e9}, {"sleep": 1.0}])
def test_times_and_stages_that_cannot_be_are_not_believed(home, took_s):
    remember_start(home, replace(START, took_s=took_s))
    assert last_start(home, RECORD) is None


def test_a_file_that_others_can_change_is_not_read(home):
    remember_start(home, START)
    (home / FILE).chmod(0o666)
    assert last_start(home, RECORD) is None
