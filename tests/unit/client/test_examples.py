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


def test_a_batch_answers_each_line_once(run, tmp_path):
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "What?"}]}
    asked = [{"custom_id": f"q{n}", "url": "/v1/chat/completions", "body": body} for n in range(3)]
    requests.write_text("".join(json.dumps(one) + "\n" for one in asked))
    assert sorted(run("batch_jsonl.py", "405b", requests, output).splitlines()) == [f"q{n} answered" for n in range(3)]
    assert run("batch_jsonl.py", "405b", requests, output) == ""
    assert len(output.read_text().splitlines()) == 3


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
