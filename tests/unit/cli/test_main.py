"""The command itself: its help, misspelt words, errors as text and as JSON, and output that nobody reads."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hpc_serve.cli import main as cli_main
from hpc_serve.cli.commands import SECONDS
from hpc_serve.cli.main import run

HEAVY = ("submitit", "openai", "httpx", "httpx2", "rich", "jinja2", "yaml", "filelock", "ray", "vllm", "torch")


@pytest.mark.parametrize("argv", [[], ["help"], ["help", "submit"], ["submit", "--help"]])
def test_help_is_a_command_and_what_was_asked_for_without_one(argv, ran):
    out, err = ran(argv)
    assert out.startswith("Usage: hpc-serve submit [OPTIONS] [MODEL]" if "submit" in argv else "Usage: hpc-serve")
    assert "submit" in argv or "submit      Start a model as a service." in out
    assert err == ""


@pytest.mark.parametrize("command", ["submit", "init", "env"])
def test_no_line_of_a_help_ends_within_an_option_or_a_path(command, ran):
    printed = ran(["help", command]).out
    assert "--" in printed
    assert [line for line in printed.splitlines() if re.search(r"\w-$", line)] == []


@pytest.mark.parametrize("command", ["plan", "render", "submit", "bench", "quantize"])
def test_a_long_help_begins_with_what_is_used_most_and_lists_each_option_once(command, ran):
    printed = ran(["help", command]).out
    options = [line.split()[0].rstrip(",") for line in printed.splitlines() if line.startswith("  -")]
    assert len(options) == len(set(options))
    found = cli_main.cli.get_command(click.Context(cli_main.cli), command)
    assert found is not None
    declared = [one for one in found.params if isinstance(one, click.Option)]
    assert [name for one in declared for name in one.opts if name not in printed] == []
    headings = [line for line in printed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Most used:"
    first = printed.split("Most used:")[1].split("\n\n")[0]
    assert 6 <= len([line for line in first.splitlines() if line.startswith("  -")]) <= 12


@pytest.mark.parametrize("argv", ["--help", "submit --help", "status -h", "chat -h", "bench -h", "--version"])
def test_help_is_quick_and_imports_nothing_heavy(argv):
    code = "import sys; from hpc_serve.cli.main import run\n"
    code += f"run({argv.split()!r})\nprint(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("Usage: hpc-serve", "hpc-serve, version"))
    assert [name for name in HEAVY if f"'{name}'" in done.stderr] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["submti"], ["no command 'submti'", "Did you mean submit?"]),
        (["zzz"], ["no command 'zzz'", "See: hpc-serve --help"]),
        (["--", "zzz"], ["no command 'zzz'"]),
        (["submit", "--modle", "8b"], ["--modle", "--model"]),
        (["submit", "--model", "8b", "stray"], ["stray"]),
        (["submit", "--model", "8b", "--nodes", "two"], ["--nodes", "two"]),
        (["submit", "--model", "8b", "--nodes", "0"], ["nodes is 0"]),
        (["submit", "--model", "8b", "--backend", "mpi"], ["--backend", "ray"]),
        (["submit", "8b", "--replicas", "0"], ["replicas is 0: it must be at least 1"]),
        (["submit", "8b", "--replicas", "2", "--cluster", "local"], ["2 replicas were asked for; leave "]),
        *(
            row
            for name in ("plan", "render", "submit")
            for row in (
                ([name], [f"No model is named: write hpc-serve {name} MODEL"]),
                ([name, "8b", "--", "--max-num-seq", "4"], ["write --max-num-seqs"]),
                ([name, "8b", "--enable-prefx-caching"], ["Did you mean '--enable-prefix-caching'?"]),
            )
        ),
        (["plan", "8b", "--model", "70b"], ["Two models are named, 8b and 70b"]),
        (["stop"], ["--replica JOB"]),
        (["submit", "--model", "8b", "--job-name", "a\nb"], ["job-name"]),
        (["submit", "--model", "8b", "--name", "a/b"], ["'a/b' cannot name a service"]),
        (["submit", "--model", "8b", "--site", "/nonexistent.yaml"], ["/nonexistent.yaml"]),
        (["submit", "--model", "8b", "--time", "soon"], ["time is 'soon'"]),
        (["submit", "--model", "8b", "--sbatch", "nodashes"], ["nodashes"]),
        (["wait", "8b", "--timeout", "soon"], ["'soon' is no time"]),
        (["chat", "8b", "--max-tokens", "x"], ["--max-tokens"]),
        (["submit", "--model", "8b", "--", "--seed", "1", "--", "x"], ["`--` ends the options for vLLM"]),
        (["forget"], ["--ended"]),
        (["forget", "8b", "--ended"], ["--ended"]),
        (["help", "sumbit"], ["Did you mean submit?"]),
    ],
)
def test_what_cannot_be_asked_for_is_one_error_on_stderr_and_exit_code_2(argv, words, ran, stand_ins):
    out, err = ran(argv, 2)
    assert (out, err[:7], stand_ins.scripts) == ("", "error: ", [])
    assert [word for word in words if word not in err] == []


def test_durations():
    assert [SECONDS.read(text) for text in ("90", "90s", "10m", "1.5h")] == [90, 90, 600, 5400]
    for text in ("", "-1", "1d", "1h30m"):
        with pytest.raises(ValueError, match="is no time"):
            SECONDS.read(text)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["status", "nonesuch"], 5, "No service or job 'nonesuch'"),
        *((words, 5, "nonesuch") for words in (["wait", "nonesuch"], ["stop", "nonesuch"], ["wake", "nonesuch"])),
        (["scale", "nonesuch", "1"], 5, "nonesuch"),
        (["wait"], 2, "Missing argument"),
        (["env", "nonesuch"], 5, "No service 'nonesuch'"),
        (["submit", "--model", "8bb"], 2, "8bb"),
        (["plan", "--model", "8b", "--gpuu", "x"], 2, "--gpu"),
        (["fetch", "no such/model/at all"], 2, "is no model of the hub"),
    ],
)
def test_an_error_of_a_command_that_answers_in_json_is_json(argv, code, words, ran):
    out, err = ran([*argv, "--json"], code)
    answer = json.loads(out)
    assert answer == {"error": answer["error"], "exit_code": code}
    assert words in answer["error"]
    assert err.startswith(f"error: {answer['error']}")


def test_commands_that_do_something_answer_in_json_too(told):
    job = told("submit", "8b")["job_id"]
    assert told("scale", "8b", "1") == {"service": "8b", "before": 1, "replicas": 1, "submitted": [], "ended": []}
    woken = told("wake", "8b")
    assert (woken["service"], woken["submitted"], bool(woken["note"])) == ("8b", [], True)
    assert [one["job_id"] for one in told("top")["services"]] == [job]
    assert [one["job_id"] for one in told("stop", "8b", "--now")["ended"]] == [job]


def test_there_is_one_json_document_only(ran, told):
    assert told("submit", "--model", "8b", "--wait", "--timeout", "0s", code=7)["job_id"] == "101"
    assert ran(["submit", "--model", "8bb", "--", "--json"], 2).out == "", "it is the engine's word"


def in_bash(words):
    command = f"{shlex.quote(sys.executable)} -m hpc_serve.cli {words}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argv", ["models --json", "--help", "status"])
def test_output_that_cannot_be_written_is_a_plain_error(argv):
    done = in_bash(f"{argv} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device.\n")


def test_a_working_folder_that_was_removed_is_said(tmp_path):
    (tmp_path / "gone").mkdir()
    place = shlex.quote(str(tmp_path / "gone"))
    python = f"{shlex.quote(sys.executable)} -m hpc_serve.cli"
    words = f"cd {place} && rmdir {place} && {python} submit 8b --cluster local"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    said = "error: the folder that you are in was removed or moved: cd to another, and try again.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_nobody_need_listen():
    closed, gone = in_bash("status >&-"), in_bash("models | true; echo ${PIPESTATUS[0]}")
    assert (closed.returncode, closed.stderr, gone.stderr) == (0, "", "")
    assert gone.stdout in ("141\n", "0\n")  # 0 if it had written all before the reader went
    assert in_bash("plan 8b | true; echo ${PIPESTATUS[0]}").stdout == "141\n"  # it prints line by line


def test_a_bug_is_told_as_one_and_shows_where_if_asked(monkeypatch, capsys, ran):
    def broken(**_):
        raise RuntimeError("oops")

    monkeypatch.setattr(cli_main.cli, "main", broken)
    assert "unexpected RuntimeError: oops" in ran(["status"], 70).err
    monkeypatch.setenv("HPC_SERVE_DEBUG", "1")
    run(["status"])
    assert "in broken" in capsys.readouterr().err


def test_ctrl_c_while_modules_are_imported_prints_no_traceback():
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # the tests may be run with Ctrl-C ignored
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['hpc-serve', 'gpus']\n"
        "from hpc_serve.cli.__main__ import start\n"
        "start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_command_begins_where_ctrl_c_is_quiet():
    setup = (Path(__file__).parents[3] / "setup.cfg").read_text()
    assert "\n    hpc-serve = hpc_serve.cli.__main__:start\n" in setup


def test_the_client_is_there_without_being_imported():
    program = (
        "import sys, hpc_serve\n"
        "assert not {'hpc_serve.client', 'openai', 'httpx'} & set(sys.modules), 'imported'\n"
        "import hpc_serve.client\n"
        "assert hpc_serve.connect is hpc_serve.client.connect\n"
        "assert hpc_serve.connect_async is hpc_serve.client.connect_async\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
