"""The stub engine refuses what real vLLM refuses: one list of requests goes to both, and the answers are compared."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.client import connect
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.trust.certificates import authority_certificate
from tests.support.real_replicas import NAME, START_S, Replicas
from tests.support.stubs import StubService

pytestmark = [pytest.mark.engine]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = "application/json"
MODEL = "the model's name"
ABSENT = "not there at all"
LONG = "the " * 3_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
MESSAGES: list[Any] = [ABSENT, [], "hi", None, 5, [5], [{}], [{"content": "x"}]]
PROMPTS: list[Any] = [ABSENT, None, "", [], 5, [104], {"a": 1}, [5.5], [-1], ["a", 5], [""], [[]]]
TOOLS: list[Any] = [[], [TOOL], 5, [{}]]

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [104]},
    "/update_weight_version": {"new_version": "step-1"},
}
CONTENT_TYPES = [
    *(None, "", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"),
    *("Application/JSON", "application/vnd.api+json", "application/jsonx", "multipart/form-data; boundary=x"),
]
NO_OBJECTS = [b"", b"{", b"[]", b"null", b'"x"', b"5", b"\xff\xfe", b'{"a": 1}', b'{"a" 1}', b"[" * 5_000]
OF_BOTH: list[dict[str, Any]] = [
    *({"model": model} for model in ("other", "", None, 5, ABSENT)),
    *({"max_tokens": most} for most in (0, -1, 2048, 10**9, 10**30, "5", "x", 5.5, None)),
    *({"n": n} for n in (0, -1, 2, "x", None, 10**6)),
    *({"temperature": value} for value in (-1, 0, 2, 3, 1e30, "hot", "1", None)),
    *({"top_p": value} for value in (0, 1, 2, -1, "x")),
    *({"top_k": value} for value in (-5, -1, 0, 1.5)),
    *({"min_p": value} for value in (0.5, 2)),
    *({"presence_penalty": value} for value in (2, 3)),
    *({"frequency_penalty": value} for value in (-2, -3)),
    *({"repetition_penalty": value} for value in (0, 1.5)),
    *({"seed": value} for value in (5, "x", 10**30)),
    *({"stop": value} for value in ("x", ["x", "y"], "", [""], 5, [5], ["x"] * 5)),
    *({"stop_token_ids": value} for value in ([5], ["x"])),
    *({"min_tokens": value} for value in (2, 5, -1)),
    *({"logit_bias": value} for value in ({"104": 5}, {"x": 5})),
    *({"prompt_logprobs": value} for value in (1, -5)),
    {"prompt_logprobs": 1, "stream": True},
    *({"stream": value} for value in ("yes", "maybe", 5)),
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}, "stream": True},
    {"stream_options": 5, "stream": True},
    *({**refused, "stream": True} for refused in ({"n": 0}, {"temperature": -1}, {"model": "other"})),
    *({"response_format": {"type": kind}} for kind in ("text", "bad")),
    *({"ignore_eos": value} for value in (True, "x")),
    *({"user": value} for value in ("me", 5)),
    {"a_field_of_nobody": 5},
]
OF_CHAT: list[dict[str, Any]] = [
    *({"messages": messages} for messages in MESSAGES),
    *({"messages": [{"role": "user", "content": content}]} for content in (5, None, "", [], [{"type": "text"}])),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]},
    *({"messages": [message]} for message in ({"role": "user"}, {"role": 5, "content": "x"}, {"role": "assistant"})),
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": LONG}], "stream": True},
    *({"max_completion_tokens": most} for most in (0, -1, 10**9)),
    *({"logprobs": value} for value in (True, 5, -1)),
    *({"logprobs": True, "top_logprobs": value} for value in (2, 100, -1)),
    {"top_logprobs": 2},
    *({"tools": tools} for tools in TOOLS),
    *({"tools": [TOOL], "tool_choice": choice} for choice in ("none", "auto", "required", "bogus")),
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tool_choice": "auto"},
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"chat_template": "{{"},
]
OF_COMPLETIONS: list[dict[str, Any]] = [
    *({"prompt": prompt} for prompt in PROMPTS),
    {"prompt": LONG},
    {"prompt": LONG, "stream": True},
    {"prompt": [104] * 3_000},
    *({"logprobs": value} for value in (5, 100, -1)),
    *({"echo": value} for value in (True, "x")),
    {"suffix": "x"},
    {"prompt_embeds": "x"},
    {"max_completion_tokens": 0},
]
OF_TOKENS: list[tuple[str, dict[str, Any]]] = [
    *(("/tokenize", {"prompt": prompt}) for prompt in (ABSENT, 5)),
    ("/tokenize", {"prompt": ABSENT, "messages": [USER]}),
    *(("/detokenize", {"tokens": tokens}) for tokens in (ABSENT, "x", 5, ["x"], [-1], [])),
    *(("/update_weight_version", {"new_version": version}) for version in (ABSENT, "", None, 5, ["x"])),
]
ROUTES = [
    *(("POST", path) for path in ("/v1/nothing", "/", "/v1/models", "/version", "/health", "/v1/chat")),
    *(("GET", path) for path in (COMPLETIONS, CHAT, "/nothing", "/", "/v1/models", "/v1/models/m", "/version")),
    *((method, COMPLETIONS) for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")),
    *((method, "/v1/models") for method in ("DELETE", "HEAD")),
    *((method, path) for method in ("GET", "POST") for path in ("/weight_info", "/update_weight_version")),
]

Sent = tuple[str, str, str | None, bytes]


def requests(model: str) -> Iterator[tuple[str, Sent]]:
    """Each request with a name: its method, path, content type and body."""

    def changed(path: str, changes: dict[str, Any]) -> bytes:
        whole = {field: value for field, value in {**BODIES[path], **changes}.items() if value is not ABSENT}
        return json.dumps({**whole, "model": model} if whole.get("model") == MODEL else whole).encode()

    for path in BODIES:
        for kind in CONTENT_TYPES:
            yield f"{path} as {kind}", ("POST", path, kind, changed(path, {}))
        for body in NO_OBJECTS:
            yield f"{path} with {body[:9]!r}", ("POST", path, JSON, body)
        yield f"{path} with nothing", ("POST", path, None, b"")
    for path, of_one in ((CHAT, OF_CHAT), (COMPLETIONS, OF_COMPLETIONS)):
        for changes in (*OF_BOTH, *of_one):
            yield f"{path} {changes}"[:120], ("POST", path, JSON, changed(path, changes))
    for path, changes in OF_TOKENS:
        yield f"{path} {changes}", ("POST", path, JSON, changed(path, changes))
    for method, path in ROUTES:
        yield f"{method} {path}", (method, path, JSON if method == "POST" else None, b"{}" if method == "POST" else b"")


def asker(home: Path, service: str) -> Callable[[Sent], Any]:
    """What sends a request to the only replica of a service, and returns the shape of the answer."""
    store = ServiceStore(home)
    (record,) = [record for record in store.read(service).records if record.state == "ready"]
    key = store.ensure_api_key(service).read_text().strip()
    trusted = ssl.create_default_context(cadata=authority_certificate(home))

    def ask(sent: Sent) -> Any:
        method, path, kind, body = sent
        headers = {"Authorization": f"Bearer {key}", **({} if kind is None else {"Content-Type": kind})}
        connection = http.client.HTTPSConnection("127.0.0.1", record.port, context=trusted, timeout=120)
        with closing(connection):
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, shape(answer.read() if answer.status != 200 else b"")

    return ask


def shape(content: bytes) -> Any:
    """Of an error its type, code and parameter, whose first two parts count; of another form its fields."""
    if not content:
        return None
    value = json.loads(content)
    if "error" not in value:
        return sorted(value)
    error = value["error"]
    return error["type"], error["code"], error["param"] and ".".join(error["param"].split(".")[:2])


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # of the stub, too
    replicas = Replicas(tmp_path / "real")
    try:
        replicas.start(engine=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
        connect(NAME, home=replicas.home, wait=START_S).close()
        yield replicas
    finally:
        replicas.close()


def test_both_refuse_the_same_requests_with_the_same_errors(real: Replicas, tmp_path: Path) -> None:
    service = StubService(tmp_path / "stub")
    with closing(service):
        service.start("--max-model-len", "2048")
        stub = asker(service.store.home, service.service)
        engine = asker(real.home, NAME)
        by_engine = {name: engine(sent) for name, sent in requests("model")}
        by_stub = {name: stub(sent) for name, sent in requests("405b")}
    assert {name: (by_engine[name], by_stub[name]) for name in by_engine if by_engine[name] != by_stub[name]} == {}
    assert len({status for status, _ in by_engine.values()}) >= 4
