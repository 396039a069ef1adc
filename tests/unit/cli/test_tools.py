"""`hpc-serve mcp` as an assistant uses it: the protocol's own client, over a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("mcp", reason="the tools need mcp")

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import ElicitResult

from hpc_serve.rendezvous.store import ServiceStore
from tests.cluster import wait_for
from tests.cluster.processes import is_alive
from tests.support.stubs import make_record


@pytest.fixture
def home(tmp_path):
    store = ServiceStore(tmp_path / "home")
    store.write(make_record(service="405b", state="failed", reason="the node is down"))
    return store.home


def call(home, *lines, answer=None):
    """Return the tools, (text, whether it is an error) of each line, a tool and its words, and what the person was
    asked, who answers with `answer`, an action."""
    questions = []

    async def person(context, params):
        questions.append(params.message)
        return ElicitResult(action=answer, content={"run": True} if answer == "accept" else None)

    async def use():
        environ = {**os.environ, "HPC_SERVE_HOME": str(home)}
        server = StdioServerParameters(command=sys.executable, args=["-m", "hpc_serve.cli", "mcp"], env=environ)
        answers = person if answer else None
        async with stdio_client(server) as pipe, ClientSession(*pipe, elicitation_callback=answers) as session:
            await session.initialize()
            results: list[Any] = [await session.call_tool(tool, {"words": words}) for tool, *words in lines]
            return (await session.list_tools()).tools, [(one.content[0].text, one.is_error) for one in results]

    return *anyio.run(use), questions


def test_each_tool_is_a_command_with_its_help(home):
    tools = {tool.name: tool for tool in call(home)[0]}
    assert {"plan", "submit", "status", "logs", "doctor", "stop"} <= set(tools)
    assert "--replicas" in tools["submit"].description
    assert "env" not in tools, "it prints the key"


def test_what_only_reads_asks_nobody(home):
    lines = (["plan", "--model", "8b", "--gpu", "h100-80gb"], ["status"], ["plan", "--no"])
    _, ((plan, _), (status, _), (wrong, is_error)), questions = call(home, *lines, answer="decline")
    assert "vllm serve" in plan
    assert "the node is down" in status
    assert ("No such option" in wrong, is_error, questions) == (True, True, [])


@pytest.mark.parametrize("answer", ["accept", "decline", None])
def test_a_change_is_made_only_if_the_person_says_so(home, answer):
    record = make_record(service="70b", state="ready", updated_at=time.time() - 1e6, job_id="77")
    ServiceStore(home).write(record)
    _, ((text, is_error),), questions = call(home, ["stop", "nobody's"], answer=answer)
    assert is_error
    if answer == "accept":
        assert "exit code" in text, "it was run, and there is no such service"
    else:
        assert "hpc-serve stop 'nobody'\"'\"'s'" in text
    assert questions == (["The assistant wants to run: hpc-serve stop 'nobody'\"'\"'s'"] if answer else [])


def test_options_that_write_are_asked_for_and_endless_ones_refused(home, tmp_path):
    plot = ["plan", "--model", "8b", "--gpu", "h100-80gb", "--plot", str(tmp_path / "plan.html")]
    _, ((drawn, _), (watched, _)), questions = call(home, plot, ["status", "-w"], answer="decline")
    assert ("declined" in drawn, (tmp_path / "plan.html").exists(), len(questions)) == (True, False, 1)
    assert "go on for ever" in watched


@pytest.mark.parametrize("words", [["stop", "8b", "--", "-h"], ["submit", "8b", "--log-dir", "-h"]])
def test_a_word_that_looks_like_a_wish_for_help_does_not_spare_the_question(home, words):
    _, ((text, is_error),), questions = call(home, words, answer="decline")
    assert ("declined" in text, is_error, len(questions)) == (True, True, 1)


def test_help_asks_nobody(home):
    _, ((text, is_error),), questions = call(home, ["stop", "--help"], answer="decline")
    assert ("Usage" in text, is_error, questions) == (True, False, [])


def test_the_question_shows_control_characters_and_line_ends(home):
    questions = call(home, ["stop", "8b\n\n\x1b[2Jstatus\u202e"], answer="decline")[2]
    assert questions == [r"The assistant wants to run: hpc-serve stop '8b\n\n\x1b[2Jstatus\u202e'"]


@pytest.mark.parametrize(("word", "why"), [("a\0b", "null byte"), ("x" * 300_000, "Argument list too long")])
def test_words_that_cannot_be_run_are_refused_with_the_reason(home, word, why):
    _, ((text, is_error),), _ = call(home, ["status", word])
    assert (why in text, is_error) == (True, True)


def test_an_assistant_that_reads_no_more_ends_it_quietly(home):
    reads, writes = os.pipe()
    os.close(reads)
    ping = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    environ = {**os.environ, "HPC_SERVE_HOME": str(home)}
    argv = [sys.executable, "-m", "hpc_serve.cli", "mcp"]
    ended = subprocess.run(argv, input=ping, stdout=writes, stderr=subprocess.PIPE, env=environ, timeout=120)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_request_that_is_cancelled_ends_its_command(home, tmp_path):
    """Slurm's command does not answer here for as long as hpc-serve waits for it, a minute."""
    squeue, asked_by = tmp_path / "squeue", tmp_path / "asked-by"
    squeue.write_text(f"#!/bin/bash\necho $PPID > {asked_by}.new; mv {asked_by}.new {asked_by}; exec sleep 600\n")
    squeue.chmod(0o755)
    environ = {**os.environ, "HPC_SERVE_HOME": str(home), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    server = StdioServerParameters(command=sys.executable, args=["-m", "hpc_serve.cli", "mcp"], env=environ)

    async def use():
        async with stdio_client(server) as pipe, ClientSession(*pipe) as session, anyio.create_task_group() as group:
            await session.initialize()
            group.start_soon(session.call_tool, "status", {"words": []})
            await anyio.to_thread.run_sync(wait_for, asked_by.exists, 40)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(wait_for, lambda: not is_alive(int(asked_by.read_text())), 40)

    anyio.run(use)
