"""What is read of a stream, and when; where an engine runs."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from hpc_serve.bench.service import AnswerReader, BenchService, error_text
from hpc_serve.rendezvous.record import NodeRecord


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, **fields}])


def read(*parts: tuple[bytes, float], start_s: float = 0.0) -> AnswerReader:
    """Read an answer that began at a time and came in parts, each with its time."""
    reader = AnswerReader(start_s)
    for data, now_s in parts:
        reader.feed(data, now_s)
    return reader


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


def test_pieces_have_the_time_at_which_they_came():
    reader = read((token("a"), 10.5), (token("") + token("b"), 11.0), (USAGE + DONE, 12.0), start_s=10.0)
    assert (reader.ttft_s, reader.itls_s, reader.latency_s) == (0.5, [0.5, 0.0], 1.0)
    assert (reader.text, reader.input_len, reader.output_len) == ("ab", 7, 2)
    assert reader.failure() == ""


def test_an_event_may_come_in_parts():
    reader = read(*((bytes([byte]), float(place)) for place, byte in enumerate(token("a") + DONE)))
    assert (reader.text, reader.ttft_s, reader.failure()) == ("a", len(token("a")) - 1, "")


def test_chat_has_deltas_and_comments_are_none():
    first = b": ping\n\n" + event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    reader = read((first, 1.0), (event(choices=[{"delta": {"content": "hi"}}]) + DONE, 2.0))
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
    assert read((data, 1.0)).failure() == failure


@pytest.mark.parametrize(("name", "is_here"), [("n1", True), (socket.gethostname(), True), ("n2", False)])
def test_an_engine_is_on_this_node_by_slurms_name_or_the_hosts(service, monkeypatch, name, is_here):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    service.start(nodes=(NodeRecord(name=name, address="127.0.0.1"),))
    watched = BenchService(service.store, "405b", "equally")
    watched.watch.refresh()
    assert watched.is_here == is_here


def test_errors_are_one_line():
    assert error_text({"error": {"message": "a\n b"}}) == "a b"
    assert error_text("gone") == "gone"
