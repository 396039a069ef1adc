"""What is read of a stream, and when."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_serve.bench.service import AnswerReader, error_text


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, **fields}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


def test_pieces_have_the_time_at_which_they_came():
    reader = AnswerReader(10.0)
    reader.feed(token("a"), 10.5)
    reader.feed(token("") + token("b"), 11.0)
    reader.feed(USAGE + DONE, 12.0)
    assert reader.ttft_s == 0.5
    assert reader.itls_s == [0.5, 0.0]
    assert reader.latency_s == 1.0
    assert (reader.text, reader.input_len, reader.output_len) == ("ab", 7, 2)
    assert reader.failure() == ""


def test_an_event_may_come_in_parts():
    reader = AnswerReader(0.0)
    for place, byte in enumerate(token("a") + DONE):
        reader.feed(bytes([byte]), float(place))
    assert reader.text == "a"
    assert reader.ttft_s == len(token("a")) - 1
    assert reader.failure() == ""


def test_chat_has_deltas_and_comments_are_none():
    reader = AnswerReader(0.0)
    reader.feed(b": ping\n\n" + event(choices=[{"delta": {"role": "assistant", "content": ""}}]), 1.0)
    reader.feed(event(choices=[{"delta": {"content": "hi"}}]) + DONE, 2.0)
    assert (reader.text, reader.ttft_s, reader.failure()) == ("hi", 1.0, "")


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b"", "the answer has no token"),
        (DONE, "the answer has no token"),
        (token("a"), "the answer ended before its end"),
        (token("a") + event(error={"message": "out of\nmemory"}) + DONE, "out of memory"),
        (token("a", finish_reason="abort") + DONE, "the engine ended the answer: abort"),
        (b"data: {no\n\n", "the engine sent what is no JSON: b'{no'"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(data, failure):
    reader = AnswerReader(0.0)
    reader.feed(data, 1.0)
    assert reader.failure() == failure


def test_errors_are_one_line():
    assert error_text({"error": {"message": "a\n b"}}) == "a b"
    assert error_text("gone") == "gone"
