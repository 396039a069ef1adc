"""Which requests may go on once begun, and what is added to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_serve.client.resume.stream import read_request

HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
TEXT_PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def read(path: str, **fields: Any):
    body = {"model": "m", "stream": True, **fields}
    return read_request(path, json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b'{"model":"m","prompt":"x"}'),
        ("/v1/completions", b'{"model":"m","prompt":"x","stream":false}'),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"\\"stream\\":true"}]}'),
        ("/v1/responses", b'{"input":"x","stream":true}'),
        ("/v1/completions", b'{"stream":true'),
        ("/v1/completions", b'["stream", true]'),
        ("/v1/completions", b""),
    ],
)
def test_other_requests_are_left_alone(path, content):
    assert read_request(path, content) is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x"]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [[1, 2, 3]], "n": 1, "echo": False, "logprobs": None}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": TEXT_PARTS, "logprobs": False, "top_logprobs": 0}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{}], "tool_choice": "none"}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "text"}, "metadata": {"a": "b"}}),
    ],
)
def test_token_ids_are_asked_for_where_a_stream_may_go_on(path, fields):
    request = read(path, **fields)
    assert request.obstacle == ""
    assert json.loads(request.content) == {"model": "m", "stream": True, **fields, "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}, "several prompts"),
        ("/v1/completions", {"prompt": "x", "n": 2}, "asks for n"),
        ("/v1/completions", {"prompt": "x", "logprobs": 0}, "asks for logprobs"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "asks for echo"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "of_a_later_version": 1}, "of_a_later_version"),
        ("/v1/completions", {"prompt": "x", "return_token_ids": False}, "no token ids"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{}]}, "call tools"),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True}, "logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"messages": IMAGE}, "more than text"),
    ],
)
def test_what_cannot_go_on_is_sent_as_it_is(path, fields, says):
    request = read(path, **fields)
    assert says in request.obstacle
    assert json.loads(request.content) == {"model": "m", "stream": True, **fields}


def test_the_users_own_wish_for_token_ids_stands():
    assert read("/v1/completions", prompt="x", return_token_ids=True).content.count(b"return_token_ids") == 1
    assert json.loads(read("/v1/completions", prompt="x", return_token_ids=None).content)["return_token_ids"] is True


@pytest.mark.parametrize(
    ("fields", "is_exact"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "repetition_penalty": 1.2, "top_p": 0.5}, True),
        ({"temperature": 0, "presence_penalty": 0, "bad_words": []}, True),
        ({}, False),
        ({"temperature": 0.1, "seed": 3}, False),
        ({"temperature": 0, "presence_penalty": 0.5}, False),
        ({"temperature": 0, "bad_words": ["x y"]}, False),
    ],
)
def test_what_follows_from_its_tokens_alone_is_exact(fields, is_exact):
    assert read("/v1/completions", prompt="x", **fields).is_exact is is_exact


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        ("/v1/completions", {"prompt": "x"}, 16),
        ("/v1/completions", {"prompt": "x", "max_tokens": None}, 16),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5}, 5),
        ("/v1/chat/completions", {"messages": HELLO}, None),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}, 5),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_bound_is_the_engines(path, fields, most):
    assert read(path, **fields).most_tokens == most
