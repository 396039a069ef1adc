"""What the load takes for a right answer. Chunks are the SDK's own values."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.faults.load import Request
from tests.support.stub_engine import chat_context, greedy_answer

LENGTH = 5


def request(**values: Any) -> Request:
    usual = {"client": "threads", "is_chat": False, "is_stream": True, "most": None, "has_usage": False, "variant": ""}
    return Request(name="ab-1", age_at_start_s=0.0, **{**usual, **values})


def received(asked: Request, *chunks: tuple[str, str | None], **more: Any) -> str:
    for text, finish in chunks:
        asked.add(Completion.construct(choices=[{"index": 0, "text": text, "finish_reason": finish}], **more))
    return asked.fault_of(LENGTH)


def test_an_answer_is_right_in_whatever_pieces_it_comes():
    answer = greedy_answer(request().question, LENGTH)
    assert received(request(), (answer, "stop")) == ""
    assert received(request(), (answer[:3], None), (answer[3:], None), ("", "stop")) == ""


@pytest.mark.parametrize(
    ("cut", "finish", "says"),
    [
        (slice(0, -4), "stop", "the text differs after 35 of 39 characters"),
        (slice(1, None), "stop", "the text differs after 0 of"),
        (slice(None), None, "finish_reason None, not 'stop'"),
        (slice(None), "length", "finish_reason 'length', not 'stop'"),
    ],
)
def test_what_is_missing_or_cut_short_is_said(cut, finish, says):
    asked = request()
    assert says.split(" of ")[0] in received(asked, (greedy_answer(asked.question, LENGTH)[cut], finish))


def test_a_bound_on_tokens_and_the_usage_are_part_of_a_right_answer():
    begun = " ".join(greedy_answer(request().question, LENGTH).split(" ")[:2])
    assert received(request(most=2), (begun, "length")) == ""
    assert "finish_reason" in received(request(most=2), (begun, "stop"))
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert received(request(most=2, has_usage=True), (begun, "length"), usage=usage) == ""
    assert received(request(most=2, has_usage=True), (begun, "length")) == "usage says None tokens, not 2"


def test_each_of_two_choices_and_a_tool_calls_arguments_are_compared():
    two = request(variant="two")
    answer = greedy_answer(two.question, LENGTH)
    assert received(two, (answer, "stop")) == "1 choices"
    two.add(Completion.construct(choices=[{"index": 1, "text": answer, "finish_reason": "stop"}]))
    assert two.fault_of(LENGTH) == ""

    call = request(variant="tools", is_chat=True)
    words = greedy_answer(chat_context(call.messages), LENGTH)
    for piece, finish in (('{"words": "', None), (words + '"}', "tool_calls")):
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        call.add(ChatCompletionChunk.construct(choices=[{"index": 0, "delta": delta, "finish_reason": finish}]))
    assert call.fault_of(LENGTH) == ""
