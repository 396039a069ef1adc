"""What people are told of a start, and when a plain line is worth it."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_serve.client.replicas.status import ProbeResult, ReplicaStatus, assess_replica
from hpc_serve.rendezvous.record import Progress, StartRecord
from hpc_serve.submit.status.job_status import CoarseChanges, detail_words, progress_words, stages_words
from hpc_serve.units import GIB, MIB
from tests.support.stubs import make_record, make_submitted

NOW = 1_000_000.0


def status(*, done: int = 34, total: int = 191, age_s: float = 0.0, **fields: Any) -> ReplicaStatus:
    start = {"stage": "weights", "since": NOW - 40, "took_s": {"nodes": 3.2, "engine": 31.0}, **fields}
    record = make_record(
        state="starting",
        stage="loading weights",
        progress=Progress(done=done, total=total),
        started_at=NOW - 75,
        updated_at=NOW,
        start=StartRecord(**start),
    )
    return assess_replica(record, submitted=make_submitted(submitted_at=NOW - 400), wall_age_s=age_s)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"time_left_s": 190.0, "bytes_per_s": 1.2 * GIB}, "1.2 GiB/s, ready in about 3 min"),
        ({"time_left_s": 190.0, "age_s": 130.0}, "ready in about 60 s"),
        ({"time_left_s": 20.0, "age_s": 60.0}, "ready in a few seconds"),
        (
            {"weights_left_s": 3_000.0, "bytes_per_s": 240.0 * MIB},
            "240 MiB/s, weights loaded in about 50 min, time left not known",
        ),
        ({"stage": "compile", "weights_left_s": 3_000.0, "bytes_per_s": 240.0 * MIB}, "time left not known"),
        ({}, "time left not known"),
        ({"stage": ""}, ""),
    ],
)
def test_what_is_known_is_said_and_no_more(fields, words):
    assert progress_words(status(**fields)) == words
    assert detail_words(status(**fields)) == "loading weights 34/191" + (f", {words}" if words else "")


def test_the_stages_have_their_times():
    said = stages_words(status(age_s=5.0))
    assert said == "queued 5 min 25 s, nodes 3 s, engine 31 s, weights for 45 s"


def test_the_stages_of_a_replica_that_is_ready():
    took = {"nodes": 0.1, "engine": 31.0, "weights": 65.0, "compile": 40.0, "capture": 12.4, "server": 3.0}
    start = StartRecord(stage="", since=NOW, took_s=took, checkpoint_bytes=int(14.9 * GIB), bytes_per_s=235.0 * MIB)
    is_ready = assess_replica(make_record(start=start), probe=ProbeResult(status="ready"))
    assert stages_words(is_ready) == (
        "engine 31 s, weights 1 min 5 s (14.9 GiB, 235 MiB/s), compile 40 s, KV cache and graphs 12 s, first answer 3 s"
    )
    assert progress_words(is_ready) == ""


def test_a_replica_of_an_earlier_version_has_no_stages():
    old = assess_replica(make_record(state="starting", stage="loading weights"))
    assert (stages_words(old), progress_words(old), detail_words(old)) == ("", "", "loading weights")


def test_a_stage_of_a_later_version_is_shown_by_its_name():
    assert stages_words(status(stage="tuning")).endswith("tuning for 40 s")


def told(statuses: list[ReplicaStatus]) -> list[int]:
    changes = CoarseChanges()
    return [place for place, one in enumerate(statuses) if changes.is_one(one)]


def test_each_quarter_of_what_is_counted_is_told_once():
    assert told([status(done=done, total=100) for done in range(101)]) == [0, 25, 50, 75]


def test_each_half_of_the_time_left_is_told_and_no_increase():
    lefts = (480.0, 470.0, 600.0, 300.0, 239.0, 250.0, 230.0, 100.0)
    assert told([status(time_left_s=left) for left in lefts]) == [0, 4, 7]


def test_a_stage_without_any_count_is_told_again_after_twice_the_time():
    seconds = [*range(0, 1000, 10)]
    lines = told([status(since=NOW - second) for second in seconds])
    assert [seconds[line] for line in lines] == [0, 60, 120, 240, 480, 960]


def test_a_new_stage_is_told():
    first, second = status(), status(done=35)
    other = assess_replica(make_record(state="starting", stage="compiling"))
    assert told([first, second, other, other]) == [0, 2]
