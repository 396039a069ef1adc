"""`env` and `chat`: a service that is asked by other tools, or by a person."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from openai.resources.chat.completions import Completions

from hpc_serve.cli.use import access
from tests.support.stubs import StubService


def test_env_prints_lines_that_a_shell_takes(live, store, ran):
    line = ran(["env", "8b"]).out + 'printf "%s %s" "$OPENAI_BASE_URL" "$OPENAI_API_KEY"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"https://127.0.0.1:{live.engines[0].port}/v1 {store.read_api_key('8b')}"
    assert set(json.loads(ran(["env", "--json"]).out)) == {"service", "model", "base_url", "api_key", "variables"}


def test_a_script_does_not_go_on_with_the_variables_of_another_service(live, ran):
    lines = ran(["env", "70b"], 5).out
    done = subprocess.run(["bash", "-ec", f"eval {shlex.quote(lines)}; echo on"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_chat_asks_once(live, ran, monkeypatch):
    assert ran(["chat", "8b", "hello", "--max-tokens", "3"]).out.startswith(f"stub-{live.engines[0].port}")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    assert "There is no question" in ran(["chat", "8b"], 2).err
    live.engines[0].kill()
    assert ran(["chat", "8b", "hello"], 5).err.startswith("error: "), "no traceback"


@pytest.mark.parametrize("word", ["nan", "inf", "1e400", "-1"])
def test_a_temperature_that_is_none_is_refused(ran, word):
    said = ran(["chat", "405b", "Why?", "--temperature", word], 2).err
    assert f"'{word}' is not a finite number" in said or "not in the range x>=0" in said


def test_a_question_that_is_no_text_is_refused_with_the_cure(live, ran, monkeypatch):
    assert "not text in UTF-8" in ran(["chat", "8b", os.fsdecode(b"gr\xfcn")], 2).err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfcn"), encoding="utf-8"))
    assert "not text in UTF-8" in ran(["chat", "8b"], 2).err


def test_an_answer_that_breaks_off_ends_its_line_before_the_error(store, ran):
    service = StubService(store.home, "8b")
    service.start("--stub-die-at-request", "1", service="8b", job_id="8")
    try:
        told = ran(["chat", "8b", "hello"], 1)
    finally:
        service.close()
    assert re.fullmatch(r"stub-\d+( word)+\n", told.out)
    assert "The stream broke" in told.err


def test_an_answer_without_text_says_why_it_ended(live, ran, monkeypatch):
    chunk = SimpleNamespace(delta=SimpleNamespace(content=None, reasoning="hm"), finish_reason="length")
    monkeypatch.setattr(Completions, "create", lambda *_, **__: [SimpleNamespace(choices=[chunk])])
    told = ran(["chat", "8b", "hello", "--max-tokens", "1"])
    assert (told.out, told.err) == ("", "8b answered without text; finish_reason: length\n")


def test_a_service_without_a_chat_says_how_it_is_asked(store, ran):
    service = StubService(store.home, "emb")
    service.start("--stub-error", "404", service="emb", job_id="8")
    try:
        said = ran(["chat", "emb", "hello"], 1).err
    finally:
        service.close()
    assert "emb has no chat: its engine generates no text" in said
    assert 'hpc_serve.connect("emb")' in said
    assert "client.embeddings.create" in said


def test_a_question_without_a_service_s_name_is_told_where_that_belongs(live, ran):
    assert "a service's name comes first: hpc-serve chat 8b hi" in ran(["chat", "hi"], 5).err
    assert ran(["chat", "why?", "--max-tokens", "1"]).out.startswith("stub-")  # no service has such a name
    live.engines[0].kill()
    assert "hpc-serve chat SERVICE hi" in ran(["chat", "hi"], 5).err
    assert "comes first" not in ran(["chat", "8b"], 5).err


def test_a_conversation_hands_on_what_was_said_and_forgets_what_was_interrupted(live, ran, monkeypatch):
    asked, answers = [], iter(["one", KeyboardInterrupt, "two"])

    def ask(client, messages, options):
        asked.append([message["content"] for message in messages])
        answer = next(answers)
        if answer is KeyboardInterrupt:
            raise answer
        return answer

    typed = Mock(side_effect=["a", "", KeyboardInterrupt, "b", "c", EOFError])
    monkeypatch.setattr(access, "_ask", ask)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert ran(["chat", "8b", "--system", "be brief"]).err.count("(interrupted)") == 2
    assert asked == [["be brief", "a"], ["be brief", "a", "one", "b"], ["be brief", "a", "one", "c"]]


@pytest.mark.parametrize(
    "words",
    [
        *(["env", ""], ["access", ""], ["chat", "", "hello"], ["chat", "8b", "hello", "--adapter", ""]),
        *(["targets", "--output", ""], ["gateway", "--port", "0", "--key-file", ""], ["batch", "in.jsonl", ""]),
        *(["batch", "in.jsonl", "out.jsonl", "--service", ""], ["targets", ""], ["top", ""]),
    ],
    ids=" ".join,
)
def test_an_empty_word_as_of_a_variable_that_is_not_set_is_not_taken_for_none(words, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    assert re.search("'' cannot name a service|is empty \\(an unset variable", ran(words, 2).err)
