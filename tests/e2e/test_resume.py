"""Streams of real vLLM whose engine is killed half-way go on at another replica, token for token.

Two replicas of one service on this machine, started by `hpc-serve submit`; one of them is killed under load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpc_serve.client import connect
from hpc_serve.errors import StreamBrokenError
from tests.cluster import wait_for
from tests.support.patience import be_patient
from tests.support.real_replicas import BEGUN, NAME, START_S, TOKENS, Answer, Replicas, ask, stream

pytestmark = [pytest.mark.engine]

KILLS = 3  # as often as an engine is started again in place
# Two chats, two completions, and so on, one after the other: each replica has one of two, as it has fewer under way.
STARTED = (0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    made = Replicas(tmp_path_factory.mktemp("resume"))
    try:
        made.start()
        made.start()
        yield made
    finally:
        made.close()


def kill_under_load(replicas: Replicas, client: Any, asked: list[dict[str, Any]]) -> list[Answer]:
    """The answers to these requests, streams at the same time, while the engine of one replica is killed."""
    pool = client._watch.pool
    wait_for(lambda: len(client._watch.refresh().ready) == 2, START_S, what="both replicas", step_s=1.0)
    begun = [threading.Event() for _ in asked]
    answers = [Answer() for _ in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        streams = []
        for number in STARTED:
            streams.append(threads.submit(stream, client, asked[number], answers[number], begun[number]))
            wait_for(lambda: taken_by(pool) == len(streams), 300, what="a replica was chosen", step_s=0.005)
        assert all(each.wait(300) for each in begun)
        replicas.kill_engine(replicas.jobs[0])
        for under_way in streams:
            under_way.result(600)
    return answers


def taken_by(pool: Any) -> int:
    """How many requests have a replica."""
    return sum(pool._under_way.values())


def were_interrupted(answers: list[Answer]) -> bool:
    """Whether the kill met four streams, chats and completions. On a slow machine all may have ended before."""
    met = [answer for answer in answers if answer.marks or answer.error is not None]
    return len(met) >= 4 and any(each.marks for each in answers[0:8:2]) and any(each.marks for each in answers[1:8:2])


def test_streams_go_on_token_for_token_when_an_engine_is_killed(replicas, show_table, monkeypatch):
    be_patient(monkeypatch)  # an engine is lost when it is killed, and each replica gets its half
    client = connect(NAME, home=replicas.home, wait=START_S)
    wait_for(lambda: len(client._watch.refresh().ready) == 2, START_S, what="both replicas", step_s=1.0)
    others: list[dict[str, Any]] = [
        {**ask(0), "n": 2, "temperature": 1.0},
        {**ask(1), "n": 2, "temperature": 1.0},
        {**ask(0), "temperature": 1.0},
        {**ask(1), "temperature": 1.0},
    ]
    asked = [*map(ask, range(8)), *others]
    with ThreadPoolExecutor(len(asked)) as threads:
        unbroken = list(threads.map(lambda wanted: stream(client, wanted, Answer()), asked[:8]))
    for _ in range(KILLS):  # the engine is started again in place
        answers = kill_under_load(replicas, client, asked)
        for number, (answer, whole) in enumerate(zip(answers, unbroken, strict=False)):
            assert len(whole.ids) == TOKENS
            assert answer.substance == whole.substance, number
            assert len(answer.heads) == 1
            assert all(mark["exact"] and mark["at_token"] >= BEGUN - 1 for mark in answer.marks)
        for answer in answers[8:10]:
            if answer.error is not None:
                assert isinstance(answer.error, StreamBrokenError)
                assert answer.error.text
        for answer in answers[10:]:
            assert len(answer.ids) == TOKENS
            assert not any(mark["exact"] for mark in answer.marks)
        if were_interrupted(answers):
            break
    assert were_interrupted(answers)
    resumed = [answer for answer in answers if answer.marks]
    broken = [answer for answer in answers if answer.error is not None]
    places = ", ".join(str(answer.marks[0]["at_token"]) for answer in resumed)
    show_table(f"{len(resumed)} of {len(answers)} streams went on, after {places} tokens; {len(broken)} could not")
