"""A stream that is broken at any byte, and goes on at another engine: what the user sees is the unbroken answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from hpc_serve.client.resume import relay as relay_module
from hpc_serve.client.resume.relay import Ask, Relay
from hpc_serve.client.resume.stream import CannotResumeError, datas, read_request
from tests.unit.client.resume.engine import FIRST, Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Zürich: 20 € — so 😀 what?"


def request(path: str, **fields: Any) -> tuple[str, bytes]:
    asked: dict[str, Any] = {"model": "m", "temperature": 0, "stream": True}
    asked |= {"messages": [{"role": "user", "content": "?"}]} if path == CHAT else {"prompt": "?", "max_tokens": 400}
    return path, json.dumps({**asked, **fields}, separators=(",", ":")).encode()


@dataclass
class Seen:
    """What a user has seen of a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, int] | None = None
    roles: int = 0
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    marks: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False


def seen(raw: bytes) -> Seen:
    assert raw == b"" or raw.endswith(b"\n\n"), "an event that is not whole"
    user = Seen()
    for data in datas(raw):
        assert not user.is_done
        if data == b"[DONE]":
            user.is_done = True
            continue
        chunk = json.loads(data)
        user.heads.add(tuple(chunk[name] for name in ("id", "object", "created", "model")))
        user.usage = chunk.get("usage") or user.usage
        user.marks += [chunk["resumed"]] if "resumed" in chunk else []
        for choice in chunk["choices"]:
            assert user.finish is None
            delta = choice.get("delta", {"content": choice.get("text")})
            user.roles += "role" in delta
            user.text += delta["content"]
            user.ids += choice.get("token_ids") or []
            user.finish = choice["finish_reason"]
    return user


def ask(relay: Relay, engine: Engine) -> Ask:
    """The last question of a way on; those before it are answered."""
    steps = relay.steps()
    try:
        question = next(steps)
        while True:
            if question.path == "/detokenize":
                question = steps.send(engine.detokenize(question.content))
                continue
            assert (question.method, question.path) == ("GET", "/v1/models")
            question = steps.send(engine.models())
    except StopIteration as end:
        return end.value


def go_on(relay: Relay, engine: Engine) -> bytes:
    """All that the next engine sends after a break."""
    relay.read()
    question = ask(relay, engine)
    assert question.method == "POST"
    relay.go_on(engine.name)
    return engine.stream(question.path, question.content)


def fed(relay: Relay, raw: bytes, size: int = 50) -> bytes:
    return b"".join(relay.feed(raw[at : at + size]) for at in range(0, len(raw), size))


def cut_off(path: str, count: int, engine: Engine | None = None, **wishes: Any) -> tuple[Relay, bytes]:
    """A stream whose engine is gone after so many events, and what its user has."""
    read = read_request(*request(path, **wishes))
    relay = Relay(read)
    events = (engine or Engine(TEXT)).stream(path, read.content).split(b"\n\n")
    user = fed(relay, b"".join(event + b"\n\n" for event in events[:count]))
    relay.read()
    return relay, user


def broken(asked: tuple[str, bytes], *breaks: int, **engine: Any) -> Seen:
    """What the user sees of a stream whose engines break after so many bytes each."""
    read = read_request(*asked)
    relay, raw = Relay(read), Engine(TEXT, **engine).stream(asked[0], read.content)
    user = b""
    for name, at in zip("bcd", breaks, strict=False):
        user += fed(relay, raw[:at])
        if relay.is_done:
            break
        relay.read()
        if (rest := relay.rest()) is not None:
            user += rest
            break
        raw = go_on(relay, Engine(TEXT, **{**engine, "name": name}))
    else:
        user += fed(relay, raw)
    assert relay.is_done
    return seen(user)


def unbroken(asked: tuple[str, bytes], **engine: Any) -> tuple[Seen, int]:
    read = read_request(*asked)
    raw = Engine(TEXT, **engine).stream(asked[0], read.content)
    relay = Relay(read)
    assert fed(relay, raw) == raw, "what does not break passes as it is"
    return seen(raw), len(raw)


WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"max_tokens": 9},
    "usage": {"stream_options": {"include_usage": True}},
    "stop": {"stop": ["what", "never comes"]},
    "stop kept": {"stop": ["so 😀"], "include_stop_str_in_output": True},
    "not too early": {"stop": "20", "min_tokens": 14},
}


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_greedy_stream_is_the_same_wherever_it_breaks(path, wishes, several):
    asked = request(path, **wishes)
    whole, length = unbroken(asked, several=several)
    for at in range(0, length, 23):
        user = broken(asked, at, several=several)
        assert (user.text, user.ids, user.finish) == (whole.text, whole.ids, whole.finish), at
        assert (user.usage, user.roles, len(user.heads)) == (whole.usage, whole.roles, 1), at
        assert all(mark["exact"] for mark in user.marks)
        assert len(user.marks) <= 1
        if user.marks:
            assert user.marks[0]["replica"] == "b"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_greedy_stream_may_break_several_times(path):
    asked = request(path, stream_options={"include_usage": True})
    whole, length = unbroken(asked)
    for first in range(100, length, 800):
        for second in range(0, 900, 170):
            user = broken(asked, first, second, second + 60)
            assert (user.text, user.ids, user.finish) == (whole.text, whole.ids, whole.finish)
            assert (user.usage, len(user.heads)) == (whole.usage, 1)


def test_the_mark_says_how_many_tokens_stand():
    asked = request(COMPLETIONS)
    _, length = unbroken(asked)
    raw = Engine(TEXT).stream(COMPLETIONS, read_request(*asked).content)
    for at in range(400, length - 200, 60):
        had = len(seen(raw[: raw.rfind(b"\n\n", 0, at) + 2]).ids)
        assert broken(asked, at).marks == [{"at_token": had, "exact": True, "replica": "b"}]


def test_a_sampled_stream_goes_on_from_its_last_whole_character():
    for count in range(1, len(TEXT.encode())):
        relay, user = cut_off(CHAT, 1 + count, temperature=0.7)
        text = seen(user).text
        other = text + " and otherwise"
        shown = seen(user + fed(relay, go_on(relay, Engine(other, name="b"))))
        assert shown.text == other
        assert shown.marks == [{"at_token": len(text.encode()), "exact": False, "replica": "b"}]


@pytest.mark.parametrize("stop", [[], ["Zug: ", "\n\n"]], ids=["no stop", "stop"])
@pytest.mark.parametrize("several", [1, 2, 3, 40])
def test_where_several_tokens_come_at_once_their_text_is_asked_for(several, stop):
    wishes, engine = {"temperature": 0.7, "stop": stop}, Engine(TEXT, several=several)
    for count in range(2, engine.stream(*request(CHAT, **wishes)).count(b"\n\n") - 1):
        relay, user = cut_off(CHAT, count, engine, **wishes)
        made = bytes(token - FIRST for token in seen(user).ids).decode(errors="ignore")
        if not seen(user).text:
            made = ""
        elif stop:  # none may have begun where the other engine goes on
            made = made.rstrip("Z")
        other = made + " and otherwise"
        shown = seen(user + fed(relay, go_on(relay, Engine(other, name="b"))))
        assert shown.text == other
        if several > 1:  # else a place is known where what was shown ends
            assert [mark["at_token"] for mark in shown.marks] == [len(made.encode())]


def test_many_tokens_are_not_made_again(monkeypatch):
    monkeypatch.setattr(relay_module, "MANY_TOKENS", 6)
    relay, _ = cut_off(COMPLETIONS, 5, Engine(TEXT, several=4))
    body = json.loads(ask(relay, Engine(TEXT)).content)
    assert body["max_tokens"] == 400 - 20


def test_a_sampled_stream_cannot_go_on_within_a_token():
    relay, _ = cut_off(CHAT, 3, Engine("A longer one", several=3), temperature=0.7)
    assert ask(relay, Engine("A longer one")).path == COMPLETIONS
    with pytest.raises(CannotResumeError, match="it ended within a token"):
        ask(relay, Inarticulate(TEXT))
    with pytest.raises(CannotResumeError, match="does not say what text"):
        ask(relay, Silent(TEXT))


class Inarticulate(Engine):
    """Its tokens have another text."""

    def detokenize(self, content):
        return {"prompt": "?"}


class Silent(Engine):
    def detokenize(self, content):
        return {"error": {"message": "Not Found"}}


@pytest.mark.parametrize(("text", "made"), [("we stop", "we "), ("we go on", "we go on")], ids=["begun", "not begun"])
def test_a_sampled_stream_ends_within_no_stop_string(text, made):
    wishes = {"temperature": 0.7, "stop": ["stopping"], "include_stop_str_in_output": True}
    relay, _ = cut_off(CHAT, 1 + len(text), Engine(text + "ping"), **wishes)
    assert relay.read().text == text
    if made == text:
        assert len(json.loads(ask(relay, Engine(text)).content)["prompt"]) == 3 + len(text)
    else:
        with pytest.raises(CannotResumeError, match="where a stop string may have begun"):
            ask(relay, Engine(text))


def test_another_replica_that_disagrees_is_not_believed():
    relay, _ = cut_off(COMPLETIONS, 3, Engine("Zürich: 20 €", several=4))
    ask(relay, Engine(TEXT))
    relay.go_on("b")
    with pytest.raises(CannotResumeError, match="other tokens"):
        fed(relay, Engine("Zug: 20 €", name="b").stream(COMPLETIONS, relay.request.content))


def test_what_is_asked_of_the_next_engine():
    kept: Any = {"top_k": 3, "seed": 5, "stop_token_ids": [4], "ignore_eos": True, "logit_bias": {"3": 1}}
    others: Any = {"max_completion_tokens": 30, "min_tokens": 20, "chat_template_kwargs": {"x": 1}, "tools": None}
    relay, _ = cut_off(CHAT, 6, **kept, **others)
    body = json.loads(ask(relay, Engine(TEXT)).content)
    made = [byte + FIRST for byte in TEXT.encode()[:5]]
    assert body == {
        **kept,
        **{"model": "m", "temperature": 0, "stream": True, "return_token_ids": True},
        **{"prompt": [7, 8, 9, *made], "max_tokens": 25, "min_tokens": 15},
    }


def test_a_chat_without_a_bound_gets_what_the_context_leaves():
    whole, length = unbroken(request(CHAT), context=3 + 20)
    assert (whole.finish, len(whole.ids)) == ("length", 20)
    for at in range(0, length, 50):
        user = broken(request(CHAT), at, context=3 + 20)
        assert (user.text, user.ids, user.finish) == (whole.text, whole.ids, "length")


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logprobs": True}],
    ids=["n", "tools", "logprobs"],
)
def test_what_cannot_go_on_is_repeated_while_nothing_of_it_came(fields):
    read = read_request(*request(CHAT, **fields))
    raw = Engine(TEXT).stream(CHAT, read.content)
    first_event = raw.index(b"\n\n") + 2
    for at in (0, first_event - 5, first_event, first_event + 20):
        relay = Relay(read)
        user = fed(relay, raw[:at])
        user += fed(relay, go_on(relay, Engine(TEXT, name="b")))
        shown = seen(user)
        assert (shown.text, shown.roles, len(shown.heads), shown.marks) == (TEXT, 1, 1, [])
    relay = Relay(read)
    fed(relay, raw[: first_event + 400])
    relay.read()
    with pytest.raises(CannotResumeError):
        relay.steps().send(None)


def test_a_delta_of_another_kind_is_not_continued():
    read = read_request(*request(CHAT))
    delta = {"index": 0, "delta": {"reasoning": "Hm"}, "token_ids": [3], "finish_reason": None}
    relay = Relay(read)
    relay.feed(b"data: " + json.dumps({"id": "a", "choices": [delta]}).encode() + b"\n\n")
    assert relay.read().is_begun
    with pytest.raises(CannotResumeError, match="begun with reasoning"):
        relay.steps().send(None)


@pytest.mark.parametrize(
    ("event", "failure"),
    [
        ({"error": {"message": "EngineCore died", "code": 500}}, "it failed: EngineCore died"),
        ({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}, "it aborted the request"),
        ({"error": {"message": "no such field", "code": 400}}, ""),
        ({"choices": [{"index": 0, "text": 'data: {"error" "finish_reason":"abort"', "finish_reason": None}]}, ""),
    ],
    ids=["error", "abort", "own fault", "text"],
)
def test_an_engine_that_says_that_it_fails_is_left(event, failure):
    relay = Relay(read_request(*request(COMPLETIONS)))
    told = b'data: {"choices":[]}\n\n'
    failing = b"data: " + json.dumps(event).replace(": ", ":", 1).encode().replace(b'": "abort', b'":"abort') + b"\n\n"
    if "error" in event:
        failing = b"data: " + json.dumps(event).encode() + b"\n\n"
    passed = relay.feed(told + failing)
    assert relay.failure == failure
    assert passed == (told if failure else told + failing)
