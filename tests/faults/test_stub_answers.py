"""The stub engine's greedy answers: the same for the same text, and continued where a text stops."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from typing import Any

import openai
import pytest

from tests.cluster import processes, wait_for
from tests.support.stub_engine import WORKER, chat_context, greedy_answer
from tests.support.stubs import StubEngine

QUESTION = "Why is the sky blue?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": "m", "temperature": 0}
LENGTH = 6


@pytest.fixture
def engines():
    made = []

    def make(*flags):
        made.append(StubEngine("--stub-greedy", "--stub-words", str(LENGTH), *flags))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def client_of(engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="none", max_retries=0)


def test_a_completion_goes_on_where_the_text_stops(engines):
    client = client_of(engines())
    whole = client.completions.create(prompt=QUESTION, **GREEDY).choices[0].text
    assert whole == greedy_answer(QUESTION, LENGTH)
    begun = client.completions.create(prompt=QUESTION, max_tokens=2, **GREEDY).choices[0]
    assert (begun.finish_reason, len(begun.text.split())) == ("length", 2)
    rest = client.completions.create(prompt=QUESTION + begun.text, **GREEDY).choices[0]
    assert (begun.text + rest.text, rest.finish_reason) == (whole, "stop")
    nothing = client.completions.create(prompt=QUESTION + whole, **GREEDY).choices[0]
    assert (nothing.text, nothing.finish_reason) == ("", "stop")


def test_a_chat_goes_on_with_its_last_message_only_if_told_to(engines):
    client = client_of(engines())
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    assert whole == greedy_answer(chat_context(MESSAGES), LENGTH)
    begun = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=2, **GREEDY)
    partial = [*MESSAGES, {"role": "assistant", "content": begun.choices[0].message.content}]
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    stream = client.chat.completions.create(messages=partial, stream=True, extra_body=go_on, **GREEDY)
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    assert partial[-1]["content"] + "".join(pieces) == whole
    assert pieces[0] == ""  # the role comes first, as from vLLM
    another = client.chat.completions.create(messages=partial, **GREEDY).choices[0].message.content
    assert another.startswith("w0.")
    with pytest.raises(openai.BadRequestError, match="not compatible"):
        client.chat.completions.create(messages=partial, extra_body={"continue_final_message": True}, **GREEDY)


def test_streams_of_two_choices_of_logprobs_and_of_a_tool_call(engines):
    client = client_of(engines())
    text = greedy_answer(chat_context(MESSAGES), LENGTH)

    def ask(**options: Any) -> list[Any]:
        chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY, **options)
        return [chunk.choices[0] for chunk in chunks][1:]

    two = ask(n=2)
    assert ["".join(c.delta.content for c in two if c.index == index) for index in (0, 1)] == [text, text]
    assert [choice.logprobs.content[0].token for choice in ask(logprobs=True)] == [c.delta.content for c in two[::2]]
    tools = ask(tools=[{"type": "function", "function": {"name": "say"}}])
    assert tools[0].delta.tool_calls[0].function.name == "say"
    arguments = "".join(choice.delta.tool_calls[0].function.arguments for choice in tools)
    assert json.loads(arguments) == {"words": text}
    assert tools[-1].finish_reason == "tool_calls"


def test_a_sampled_answer_differs_unless_it_has_a_seed(engines):
    client = client_of(engines())

    def ask(**options: Any) -> str:
        return client.completions.create(model="m", prompt=QUESTION, **options).choices[0].text

    assert ask() != ask()
    assert ask(seed=3) == ask(seed=3) != ask(temperature=0)


def metric(engine, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name} (\S+)$", text, re.MULTILINE))


def test_a_hung_engine_is_healthy_and_its_metrics_and_work_log_say_what_it_does(engines, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    engine = engines("--stub-hang-file", str(hang), "--stub-work-log", str(tmp_path), "--stub-slots", "1")
    client = client_of(engine)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(prompt=QUESTION, timeout=openai.Timeout(60.0, read=2.0), **GREEDY)
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/health") as answer:
        assert answer.status == 200
    aborted = 'request_success_total{.*finished_reason="abort"}'
    wait_for(lambda: metric(engine, aborted) == 1, 60, what="the end of a request whose client has left")
    assert metric(engine, "num_requests_running{.*}") == metric(engine, "num_requests_waiting{.*}") == 0
    made = metric(engine, "generation_tokens_total{.*}")
    hang.unlink()
    client.completions.create(prompt=QUESTION, max_tokens=2, **GREEDY)
    assert metric(engine, "generation_tokens_total{.*}") == made + 2
    # An answer is here before the engine has counted and written down that it ended.
    at_bound = 'request_success_total{.*finished_reason="length"}'
    wait_for(lambda: metric(engine, at_bound) == 1, 60, what="the count of the other")
    (log,) = tmp_path.glob("*.jsonl")
    wait_for(lambda: log.read_text().count("\n") == 4, 60, what="four lines")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["begun", "abort", "begun", "length"]
    assert lines[-2]["context"] == QUESTION
    assert lines[-1]["tokens"] == 2


def test_at_sigterm_requests_under_way_get_the_shutdown_timeout_and_new_ones_500(engines, tmp_path):
    hang = tmp_path / "hang"
    hang.touch()
    engine = engines("--stub-hang-file", str(hang), "--stub-hang-after", "2", "--shutdown-timeout", "300")
    client = client_of(engine)
    stream = client.completions.create(prompt=QUESTION, stream=True, **GREEDY)
    first = next(iter(stream)).choices[0].text
    engine.process.terminate()

    def is_refused() -> bool:
        try:
            client.completions.create(prompt=QUESTION, max_tokens=1, **GREEDY)
        except openai.InternalServerError:
            return True
        return False

    wait_for(is_refused, 60, what="an answer with 500", step_s=0.01)
    hang.unlink()
    assert first + "".join(chunk.choices[0].text for chunk in stream) == greedy_answer(QUESTION, LENGTH)
    assert engine.process.wait(60) == 0


def test_an_engine_whose_worker_ends_tells_each_client_and_ends(engines, tmp_path):
    dying = tmp_path / "dying"
    dying.touch()
    answers = ("--stub-word-s", "0.05", "--stub-words", "1000000")
    engine = engines("--stub-worker", *answers, "--stub-dying-file", str(dying))
    stream = client_of(engine).completions.create(prompt=QUESTION, stream=True, **GREEDY)
    next(stream)
    (worker,) = wait_for(lambda: _workers(engine.process.pid), 60, what="its worker")
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="EngineCore encountered an issue"):
        client_of(engine).completions.create(prompt=QUESTION, **GREEDY)
    dying.unlink()
    assert engine.process.wait(timeout=60) == 1


def _workers(engine: int) -> list[int]:
    """A child is one once it runs its program."""
    return [pid for pid in processes.pids() if _parent(pid) == engine and processes.argv_of(pid) == (WORKER,)]


def _parent(pid: int) -> int:
    return int(processes.status_of(pid).get("PPid", 0))
