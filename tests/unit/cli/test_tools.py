"""`hpc-serve mcp` as an assistant uses it: the protocol's own client, over a pipe."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import anyio
import pytest

pytest.importorskip("mcp", reason="the tools need mcp")

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import ElicitResult

from hpc_serve.rendezvous.store import ServiceStore
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
