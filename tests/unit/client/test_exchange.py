"""Requests and streams whose engines are lost half-way: which of them are sent again, and how a stream goes on."""

import asyncio
import io
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from hpc_serve.client import connect, connect_async
from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import WaitPolicy
from hpc_serve.client.replicas.event_loops import InThread, run_blocking
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests import exchange
from hpc_serve.client.requests.attempt import MOST_ENGINES
from hpc_serve.client.requests.exchange import Exchange, NoReplicaError
from hpc_serve.client.resume.stream import read_request
from hpc_serve.errors import StreamBrokenError, WaitTimeoutError
from tests.support.patience import wait_until
from tests.support.stub_engine import chat_context, greedy_answer
from tests.unit.client.conftest import one_engine

QUESTION = "Why is the sky blue?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
WORDS = 12
GREEDY = ("--stub-greedy", "--stub-words", str(WORDS))
MORTAL = (*GREEDY, "--stub-die-at-request", "1")
USAGE: Any = {"include_usage": True}
TOOLS: Any = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]


@pytest.fixture
def service(service, no_looks, monkeypatch):
    """A stream breaks where its engine has ended it: nobody else cuts its connection."""
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 0.5)
    return service


def arguments(*, is_chat: bool, **options: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if is_chat else {"prompt": QUESTION, "max_tokens": 100}
    return {"model": "405b", "temperature": 0, "stream": True, **prompt, **options}


def answer(*, is_chat: bool) -> str:
    return greedy_answer(chat_context(MESSAGES) if is_chat else QUESTION, WORDS)


def text_of(choice) -> str:
    return (choice.delta.content or "") if hasattr(choice, "delta") else choice.text


def begin(service, asker, *flags: str, **options: Any):
    """A stream from the only engine, which is to die, and its chunks up to the first with text; then another comes."""
    service.start(*MORTAL, *flags)
    asking = asker(max_retries=0)
    stream = asking.create(is_chat=options["is_chat"], **arguments(**options))
    chunks: list[Any] = []
    while not any(text_of(choice) for chunk in chunks for choice in chunk.choices):
        chunks.append(next(stream))
    service.start(*GREEDY, *flags)
    return asking.client, stream, chunks


def judge(chunks, *, is_chat: bool, has_usage: bool, halves: int = 1) -> None:
    """That these are the chunks of one stream, with the whole answer."""
    assert len({(chunk.id, chunk.object, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(map(text_of, choices)) == answer(is_chat=is_chat)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
    assert len(ids) == len(set(ids)) == halves * WORDS
    if is_chat:
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    (mark,) = [chunk.resumed for chunk in chunks if hasattr(chunk, "resumed")]
    assert mark["exact"] is True
    assert mark["replica"] == "101-r0-0.json"
    if has_usage:
        prompt = len(chat_context(MESSAGES) if is_chat else QUESTION)
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, halves * WORDS)
        assert usage.total_tokens == prompt + halves * WORDS


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("has_usage", [True, False], ids=["usage", "no usage"])
def test_a_greedy_stream_goes_on_at_another_replica(service, asker, is_chat, has_usage):
    options = {"stream_options": USAGE} if has_usage else {}
    client, stream, chunks = begin(service, asker, is_chat=is_chat, **options)
    judge([*chunks, *stream], is_chat=is_chat, has_usage=has_usage)
    assert service.engines[0].process.wait(60) == 1
    assert client._watch.pool._under_way == {}


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
def test_a_token_whose_text_had_not_come_is_made_again(service, asker, is_chat):
    _, stream, chunks = begin(service, asker, "--stub-halves", is_chat=is_chat, stream_options=USAGE)
    judge([*chunks, *stream], is_chat=is_chat, has_usage=True, halves=2)


def test_a_stream_may_break_again(service):
    _, client = one_engine(service, *MORTAL)
    stream = client.completions.create(**arguments(is_chat=False, max_tokens=WORDS))
    next(stream)
    service.start(*MORTAL)
    next(chunk for chunk in stream if hasattr(chunk, "resumed"))
    service.start(*GREEDY)
    marks = [chunk.resumed["replica"] for chunk in stream if hasattr(chunk, "resumed")]
    assert marks == ["102-r0-0.json"]


def test_the_sdks_own_accumulation_takes_a_resumed_stream(service):
    _, client = one_engine(service, *MORTAL)
    with client.chat.completions.stream(model="405b", temperature=0, messages=MESSAGES) as stream:
        events = iter(stream)
        next(events)
        service.start(*GREEDY)
        for _ in events:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == answer(is_chat=True)


# Its first letter is in no token: where a stop string may have begun, the stream goes on from an earlier token.
@pytest.mark.parametrize("stop", [None, "no stop string that ever comes"], ids=["no stop", "stop"])
def test_a_sampled_stream_goes_on_and_says_so(service, asker, stop):
    _, stream, chunks = begin(service, asker, is_chat=True, temperature=0.8, stop=stop)
    chunks += stream
    text = "".join(text_of(chunk.choices[0]) for chunk in chunks)
    assert [int(place) for place in re.findall(r"w(\d+)\.", text)] == list(range(WORDS))
    assert text != answer(is_chat=True)
    (mark,) = [chunk.resumed for chunk in chunks if hasattr(chunk, "resumed")]
    assert mark == {"at_token": WORDS // 2 + 1, "exact": False, "replica": "101-r0-0.json"}


@pytest.mark.parametrize(("options", "why"), [({"n": 2}, "asks for n"), ({"tools": TOOLS}, "may call tools")])
def test_what_cannot_go_on_is_an_error_that_holds_what_had_come(service, asker, options, why):
    service.start(*MORTAL)
    stream = asker(max_retries=0).create(**arguments(is_chat=True, **options))
    chunks = [next(stream)]
    service.start(*GREEDY)
    with pytest.raises(StreamBrokenError, match=f"cannot go on at another replica: it {why}") as broken:
        chunks += stream
    assert broken.value.replica == "100-r0-0.json"
    assert bool(broken.value.text) == ("tools" not in options)
    assert answer(is_chat=True).startswith(broken.value.text)
    assert len(broken.value.chunks) > WORDS // 2
    assert broken.value.chunks[1]["choices"][0]["delta"]


@pytest.mark.parametrize("options", [{}, {"n": 2}], ids=["plain", "n"])
def test_a_stream_without_a_token_is_simply_repeated(service, options):
    engine, client = one_engine(service, *GREEDY, "--stub-first-s", "30")
    answers: list[list[Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(list(client.chat.completions.create(**arguments(is_chat=True, **options))))
    )
    asking.start()
    wait_until(lambda: client._watch.pool._under_way)
    service.start(*GREEDY)
    engine.kill()
    asking.join(60)
    choices = [choice for chunk in answers[0] for choice in chunk.choices if not choice.index]
    assert not any(hasattr(chunk, "resumed") for chunk in answers[0])
    assert "".join(map(text_of, choices)) == answer(is_chat=True)
    assert next(choice.delta.role for choice in choices if choice.delta.role) == "assistant"


def test_a_successor_that_comes_is_waited_for(service, monkeypatch):
    monkeypatch.setattr(exchange, "LOST_WAIT_S", 60.0)
    service.start(*MORTAL)
    successor = service.start(*GREEDY, state="starting", stage="loading weights")
    client = connect("405b", max_retries=0)
    coming = threading.Timer(1.0, lambda: service.publish(successor, counter=2))
    stream = client.completions.create(**arguments(is_chat=False))
    coming.start()
    assert "".join(text_of(chunk.choices[0]) for chunk in stream) == answer(is_chat=False)
    coming.join()


def test_the_wait_for_a_successor_begins_when_the_replica_is_lost(service, monkeypatch):
    """A stream may be longer than the wait: what it took until then does not count."""
    begun: list[Any] = []

    def policy(wait):
        begun.append(wait)
        return WaitPolicy(wait)

    monkeypatch.setattr(exchange, "WaitPolicy", policy)
    service.start(*MORTAL)
    stream = connect("405b", max_retries=0).completions.create(**arguments(is_chat=False))
    next(stream)
    assert begun == []
    with pytest.raises(StreamBrokenError, match="no other one is ready") as broken:
        list(stream)
    assert begun == [exchange.LOST_WAIT_S]
    assert broken.value.text == " ".join(answer(is_chat=False).split(" ")[: WORDS // 2 + 1])
    assert len(broken.value.token_ids) == WORDS // 2 + 1


def test_without_resume_a_broken_stream_is_the_sdks_error(service):
    service.start(*MORTAL)
    client = connect("405b", max_retries=0, resume=False)
    stream = client.completions.create(**arguments(is_chat=False))
    first = next(stream)
    service.start(*GREEDY)
    assert not hasattr(first.choices[0], "token_ids")
    with pytest.raises((openai.APIConnectionError, http.TransportError)):
        list(stream)
    assert client.with_options(timeout=5)._resume is False


@pytest.mark.parametrize(
    ("is_stream", "error"), [(False, openai.APIConnectionError), (True, StreamBrokenError)], ids=["whole", "stream"]
)
def test_a_request_that_ends_engines_does_not_end_them_all(service, is_stream, error):
    engines = [service.start(*MORTAL, "--stub-words", "40") for _ in range(5)]
    client = connect("405b")
    with pytest.raises(error, match="3 replicas were lost with it"):
        list(client.completions.create(**arguments(is_chat=False, max_tokens=40, stream=is_stream)))
    wait_until(lambda: sum(engine.process.poll() is not None for engine in engines) == 3)


@pytest.mark.parametrize("resume", [True, False])
def test_no_async_generator_of_ours_is_left_to_the_event_loop(service, resume):
    """The SDK leaves generators suspended; each of ours would cost a task at the end of a stream."""
    begun: list[str] = []

    async def talk():
        service.start(*GREEDY)
        client = await connect_async("405b", resume=resume)
        first_iteration = sys.get_asyncgen_hooks().firstiter

        def note(generator) -> None:
            begun.append(generator.ag_code.co_filename)
            first_iteration(generator)

        sys.set_asyncgen_hooks(firstiter=note)
        stream = await client.chat.completions.create(**arguments(is_chat=True))
        assert [chunk async for chunk in stream]
        await client.close()

    asyncio.run(talk())
    assert any("openai" in name for name in begun)
    assert not [name for name in begun if Path(name).is_relative_to(Path(exchange.__file__).parent)]


# Whether a request may be sent again, and how often: what failed it is made up, and no engine is asked


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


@pytest.mark.parametrize(
    ("path", "error", "raised"),
    [
        ("/v1/responses", http.ReadError("reset"), openai.APIConnectionError),
        ("/v1/responses", http.ReadTimeout("slow"), openai.APITimeoutError),
        ("/v1/responses", http.ConnectTimeout("slow"), NoReplicaError),
        (CHAT, http.ConnectError("refused"), NoReplicaError),
        ("/v1/embeddings", http.ReadTimeout("slow"), http.ReadTimeout),
    ],
)
def test_what_may_have_had_an_effect_is_not_sent_again(watch, path, error, raised):
    given = Given(watch, error, returns=True)
    with pytest.raises(raised):
        run_blocking(exchange_of(watch, given, post(path)).begin())
    assert given.count == (2 if raised is NoReplicaError else 1)
    assert watch.pool._under_way == {}


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
