"""The thread that watches requests under way: it outlives what goes wrong in it, and threads that cannot be had."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from typing import Any

import pytest

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.silence import request_watch
from hpc_serve.client.silence.request_watch import Look, LookResult, RequestWatch
from hpc_serve.trust.connection import Identity
from tests.support.patience import wait_until

IDENTITY = Identity(certificate="", api_key="k")


class Request:
    """A request at replica a."""

    replica = ReplicaAddress(name="a", host="h", port=1, identity=IDENTITY)
    why_lost: str | None = None
    began_at_s = 0.0
    prompt_bytes = 1
    heard_at_s = float("-inf")
    is_talking = False
    is_abandoned = False
    is_second = False
    second = None
    is_waiting = True
    ask_beside: Callable[[Any], bool] | None = None

    def cut(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        self.is_abandoned = True

    def end(self) -> None:
        pass


class Ears:
    """In place of `Silence`: fails as often as it is told, then says that replica a is lost once it is."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.heard, self.lost = failures, 0, dict[str, str]()
        self.late: Set[str] = frozenset()

    def stood_still(self, seconds: float) -> None:
        pass

    def listen(self, requests) -> dict[str, str]:
        self.heard += 1
        if self.failures:
            self.failures -= 1
            raise RuntimeError("can't start new thread")
        return self.lost


def watch_by(look: Look, ears: Any) -> RequestWatch:
    return RequestWatch(look, ears)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(request_watch, "LISTEN_S", 0.01)
    monkeypatch.setattr(request_watch, "LOOK_S", 0.05)


def no_threads(monkeypatch, *, but: str = ""):
    """Threads cannot be started until the returned function is called; those whose name has `but` in it can."""
    start = threading.Thread.start

    def refuse(thread):
        if not but or but not in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_it_goes_on_after_an_error(caplog):
    ears, request = Ears(failures=3), Request()
    watch = watch_by(lambda names: LookResult(), ears)
    watch.begin(request)
    wait_until(lambda: ears.heard > 3)
    ears.lost = {"a": "it fell silent"}
    wait_until(lambda: request.is_abandoned)
    watch.end(request)
    assert "watching the requests under way" in caplog.text


def test_a_thread_that_cannot_be_started_is_started_with_the_next_request(monkeypatch):
    ears = Ears()
    watch = watch_by(lambda names: LookResult(), ears)
    again = no_threads(monkeypatch)
    first = Request()
    watch.begin(first)
    again()
    assert not ears.heard
    second = Request()
    watch.begin(second)
    wait_until(lambda: ears.heard)
    for request in (first, second):
        watch.end(request)


def test_a_look_that_cannot_be_started_is_made_later(monkeypatch):
    looks = []

    def look(names):
        looks.append(names)
        return LookResult(lost={"a": "its record says so"})

    ears, request = Ears(), Request()
    watch = watch_by(look, ears)
    again = no_threads(monkeypatch, but="request-watch")
    watch.begin(request)
    wait_until(lambda: ears.heard > 20)
    assert not looks
    again()
    wait_until(lambda: request.is_abandoned)
    watch.end(request)
    assert looks[0] == {"a"}
