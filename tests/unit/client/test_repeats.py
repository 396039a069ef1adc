"""Whether a request may be sent again, and how often: what failed it is made up, and no engine is asked."""

from __future__ import annotations

import io
import json
from typing import Any

import openai
import pytest

from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.event_loops import InThread, run_blocking
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import MOST_ENGINES
from hpc_serve.client.requests.exchange import Exchange, NoReplicaError
from hpc_serve.client.resume.stream import read_request
from hpc_serve.errors import StreamBrokenError, WaitTimeoutError
from hpc_serve.rendezvous.gate_headers import DRAINING_HEADER

CHAT = "/v1/chat/completions"
STREAM = json.dumps({"model": "405b", "messages": [], "stream": True}).encode()


def post(path: str, content: bytes = b"{}") -> http.Request:
    return http.Request("POST", f"http://x{path}", content=content)


class Given(InThread):
    """Connections on which happens what is given: one failure or response for each time that something is sent."""

    def __init__(self, watch: ServiceWatch, *sent: Any, returns: bool) -> None:
        self._watch, self._sent, self._returns = watch, list(sent), returns
        self._replicas = watch.pool.others(set())
        self.count = 0

    async def call(self, function: Any, *arguments: Any) -> Any:
        """Look at nothing. A replica that was dropped is offered again by the next look, if it `returns`."""
        if self._returns:
            self._watch.pool.fill(self._replicas)
        elif function == self._watch.find_one:
            raise WaitTimeoutError("none is ready")

    async def send(self, message: Any, *_: Any) -> Any:
        self.count += 1
        assert self.count < 50, "it is repeated without an end"
        outcome = self._sent.pop(0) if len(self._sent) > 1 else self._sent[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Broken(outcome)


class Broken:
    """An answer that breaks off before the first byte of its body."""

    is_event_stream = False

    def __init__(self, given: http.Response) -> None:
        self.status_code, self.headers = given.status_code, given.headers

    async def read(self) -> bytes:
        raise http.ReadError("reset")

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def watch(service):
    for _ in range(2):
        service.start()
    watch = ServiceWatch(service.store, "405b")
    watch.refresh()
    return watch


def exchange_of(watch, given, request=None, *, resume=False):
    return Exchange(watch, given, Message.of(request or post(CHAT)), resume=resume, wait=None)


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_request_that_is_refused_everywhere_afterwards_ends_as_lost(watch, returns):
    """The SDK would send it again by itself after a connection error, and begin to count anew."""
    given = Given(watch, http.ReadError("reset"), http.ConnectError("refused"), returns=returns)
    with pytest.raises(openai.APIConnectionError, match="was lost with its replica and is not sent again: no other"):
        run_blocking(exchange_of(watch, given).begin())
    assert given.count <= 2 + MOST_ENGINES
    assert watch.pool._under_way == {}


def test_a_request_that_was_refused_everywhere_may_be_tried_again_by_the_sdk(watch):
    given = Given(watch, http.ConnectError("refused"), returns=True)
    with pytest.raises(NoReplicaError):
        run_blocking(exchange_of(watch, given).begin())
    assert given.count == 2


def broken(watch, given):
    """An exchange whose stream has broken before a word came, and its relay."""
    exchange = exchange_of(watch, given, post(CHAT, STREAM), resume=True)
    assert read_request(CHAT, STREAM) is not None
    assert exchange.relay is not None
    return exchange, exchange.relay


def test_a_broken_stream_that_is_refused_everywhere_ends(watch):
    given = Given(watch, http.ConnectError("refused"), returns=True)
    exchange, relay = broken(watch, given)
    with pytest.raises(StreamBrokenError, match="no other one is ready"):
        run_blocking(exchange.go_on(relay, "100-r0-0.json", http.ReadError("reset")))
    assert given.count <= 2 + MOST_ENGINES


def test_an_error_whose_body_breaks_while_a_stream_goes_on_is_a_loss_like_others(watch):
    given = Given(watch, http.Response(500), returns=True)
    exchange, relay = broken(watch, given)
    with pytest.raises(StreamBrokenError, match="3 replicas were lost with it"):
        run_blocking(exchange.go_on(relay, "100-r0-0.json", http.ReadError("reset")))
    assert given.count == MOST_ENGINES - 1
    assert watch.pool._under_way == {}


def test_a_form_with_a_file_is_sent_again(watch):
    sound = io.BytesIO(b"RIFF")
    request = http.Request(
        "POST", "http://x/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("a.wav", sound)}
    )
    given = Given(watch, http.ReadError("reset"), http.Response(200), returns=False)
    exchange = exchange_of(watch, given, request)
    run_blocking(exchange.begin())
    assert exchange.answer.status_code == 200
    assert given.count == 2
    assert b"RIFF" in request.content


def test_a_request_goes_on_from_a_replica_that_drains(watch):
    draining = http.Response(503, headers=[DRAINING_HEADER])
    given = Given(watch, draining, http.Response(200), returns=False)
    exchange = exchange_of(watch, given)
    run_blocking(exchange.begin())
    assert exchange.answer.status_code == 200
    assert given.count == 2
