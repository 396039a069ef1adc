"""The scripts of examples/, each as a person runs it, with a stub engine as the service."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_the_notebook_runs_from_its_first_cell_to_the_last(service, capsys):
    """As a kernel runs it: one loop, in which cells may wait. No Jupyter is installed here."""
    service.start("--stub-words", "3")
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}

    async def run_cells() -> None:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"]).replace('"70b"', '"405b"')
                code = compile(source, cell["id"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                waits = eval(code, names)
                if waits is not None:
                    await waits

    asyncio.run(run_cells())
    assert len(names["answers"]) == 32
    assert capsys.readouterr().out.strip()


ONDEMAND = EXAMPLES / "open_ondemand"
STAND_IN = """\
#!/bin/bash
printf '[%s]' "$@" >> "$SEEN"
echo >> "$SEEN"
[[ $1 != submit ]] || exit "${FAILS:-0}"
"""
BASIC = """\
cd "$1"
clean_up() { echo "over $1" >> "$SEEN"; exit "$1"; }
source before.sh
bash script.sh & SCRIPT_PID=$!
source after.sh
echo "shown $service" >> "$SEEN"
kill -TERM "$SCRIPT_PID"
wait "$SCRIPT_PID"
"""


@pytest.fixture
def session(tmp_path):
    """Runs a session of the app as Open OnDemand's "basic" template does, its form filled in; the commands it gave."""

    def run(model: str, options: str = "", fails: int = 0) -> list[str]:
        said = {"context.model": model, "context.options": options, "context.bc_num_hours.to_i": "4"}
        for path in (ONDEMAND / "template").iterdir():
            text = re.sub(r"<%= (\S+) %>", lambda found: said[found[1]], path.read_text())
            assert "<%" not in text
            (tmp_path / path.stem).write_text(text)
        programs = tmp_path / "env" / "bin"
        programs.mkdir(parents=True)
        (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
        (programs / "hpc-serve").write_text(STAND_IN)
        (programs / "hpc-serve").chmod(0o755)
        seen = tmp_path / "seen"
        given = {"HPC_SERVE_ENV": str(programs.parent), "SLURM_JOB_ID": "7", "SEEN": str(seen), "FAILS": str(fails)}
        subprocess.run(
            ["bash", "-c", BASIC, "basic", str(tmp_path)], env={**os.environ, **given}, timeout=120, check=False
        )
        return seen.read_text().splitlines()

    return run


def test_a_session_of_open_ondemand_starts_a_service_and_ends_it(session):
    """On a stand-in: no portal is here."""
    assert session("8b; touch /tmp/no", "--partition gpu  --tools") == [
        "[submit][8b; touch /tmp/no][--name][ondemand-7][--time][4:00:00][--partition][gpu][--tools][--wait]",
        "shown ondemand-7",
        "[stop][ondemand-7]",
    ]


def test_a_session_whose_service_does_not_start_is_over(session):
    submitted, *after = session("8b", fails=1)
    assert submitted == "[submit][8b][--name][ondemand-7][--time][4:00:00][--wait]"
    assert sorted(after) == ["[stop][ondemand-7]", "over 1"]


def test_the_words_of_the_open_ondemand_app_are_valid():
    for name in ("manifest.yml", "form.yml", "submit.yml.erb"):
        assert isinstance(yaml.safe_load((ONDEMAND / name).read_text()), dict)
    form = yaml.safe_load((ONDEMAND / "form.yml").read_text())
    asked = set(re.findall(r"context\.(\w+)", (ONDEMAND / "template" / "script.sh.erb").read_text()))
    assert asked == set(form["form"])
    assert set(re.findall(r"<%= (\w+) %>", (ONDEMAND / "view.html.erb").read_text())) == {"service"}
