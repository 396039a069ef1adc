"""The scripts of examples/, each as a person runs it, with a stub engine as the service."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stubs import StubService

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ASK_FOR_MODELS = """
import os, ssl, urllib.request
trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"]))
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=key)
print(urllib.request.build_opener(urllib.request.ProxyHandler({}), trusted).open(request).read().decode())
"""


@pytest.fixture
def run(service: StubService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs an example with words of the command line; what it prints."""

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    service.start()
    return run


def test_a_batch_answers_each_line_once_also_where_it_was_broken_off(run, tmp_path):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text(
        "".join(json.dumps({"id": number, "prompt": f"What is {number}?"}) + "\n" for number in range(5))
    )
    answers.write_text(json.dumps({"id": 3, "answer": "three"}) + "\n")
    assert run("batch_jsonl.py", "405b", questions, answers) == "4 answered, 1 were there\n"
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(one["id"] for one in found) == [0, 1, 2, 3, 4]
    assert all(one["answer"] for one in found)


def test_a_line_that_is_refused_is_told_and_stops_no_other(run, tmp_path, capsys):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    prompts = [*(f"What is {number}?" for number in range(80)), "long " * 30_000]
    questions.write_text(
        "".join(json.dumps({"id": number, "prompt": text}) + "\n" for number, text in enumerate(prompts))
    )
    for printed in ("80 answered, 0 were there", "0 answered, 80 were there"):
        with pytest.raises(SystemExit, match=r"1 refused: \S+answers.errors.jsonl says why"):
            run("batch_jsonl.py", "405b", questions, answers)
        assert printed in capsys.readouterr().out
        assert sorted(json.loads(line)["id"] for line in answers.read_text().splitlines()) == list(range(80))
        (refused,) = map(json.loads, (tmp_path / "answers.errors.jsonl").read_text().splitlines())
        assert refused["id"] == 80
        assert "maximum context length" in refused["error"]


@pytest.mark.parametrize("half", ['{"id": 1, "answer": "o', '{"id": 1', "{", '{"id": 1, "answer": "ü'], ids=ascii)
def test_a_half_written_last_line_is_cut_off_and_asked_again(run, tmp_path, half):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"id": number, "prompt": "What?"}) + "\n" for number in range(3)))
    whole = json.dumps({"id": 0, "answer": "zero"}) + "\n"
    answers.write_bytes(whole.encode() + half.encode().removesuffix("ü".encode()[1:]))
    assert run("batch_jsonl.py", "405b", questions, answers) == "2 answered, 1 were there\n"
    assert answers.read_text().startswith(whole)
    assert sorted(json.loads(line)["id"] for line in answers.read_text().splitlines()) == [0, 1, 2]


def test_a_tool_is_called_and_its_result_goes_back(run):
    first, answer = run("tools.py", "405b", "How much space is left?").splitlines()
    assert first.startswith("free_space({}) = ")
    assert first.endswith(" GiB")
    assert answer.strip() not in ("", "None")


def test_the_nearest_line_comes_first(run, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("a b c\n\nqueue of jobs\nthe weather\n")
    printed = run("embeddings.py", "405b", file, "queue of jobs").splitlines()
    assert printed[0] == "1.000  queue of jobs"
    assert len(printed) == 3


def test_another_program_finds_all_it_needs_in_its_environment(run, service):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    argv = ["bash", str(EXAMPLES / "ask_with_env.sh"), "405b", sys.executable, "-c", ASK_FOR_MODELS]
    done = subprocess.run(argv, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "405b" in [model["id"] for model in json.loads(done.stdout)["data"]]


def test_the_page_of_examples_names_each():
    page = (EXAMPLES.parent / "docs" / "start" / "another-job.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.iterdir() if f"examples/{path.name}" not in page] == []


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")))
def test_an_example_without_arguments_says_which_it_takes(example: str) -> None:
    program = sys.executable if example.endswith(".py") else "bash"
    told = subprocess.run([program, EXAMPLES / example], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (1, "")
    assert f"{example} SERVICE" in told.stderr
    assert "Traceback" not in told.stderr
