"""`hpc-serve mcp` as an assistant uses it: the protocol's own client, over a pipe."""

from __future__ import annotations

import os
import sys
import time

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


def talk(home, ask, answer=None):
    """Let `ask` use a session with the server; the person answers what is asked with `answer`, an action."""
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
            return await ask(session)

    return anyio.run(use), questions


def text_of(result):
    return result.content[0].text


def test_each_tool_is_a_command_with_its_help(home):
    found, _ = talk(home, lambda session: session.list_tools())
    tools = {tool.name: tool for tool in found.tools}
    assert {"plan", "submit", "status", "logs", "doctor", "stop"} <= set(tools)
    assert "--replicas" in tools["submit"].description
    assert "env" not in tools, "it prints the key"


def test_what_only_reads_asks_nobody(home):
    async def ask(session):
        plan = await session.call_tool("plan", {"words": ["--model", "8b", "--gpu", "h100-80gb"]})
        return (
            plan,
            await session.call_tool("status", {"words": []}),
            await session.call_tool("plan", {"words": ["--no"]}),
        )

    (plan, status, wrong), questions = talk(home, ask, "decline")
    assert "vllm serve" in text_of(plan)
    assert "the node is down" in text_of(status)
    assert wrong.is_error
    assert "No such option" in text_of(wrong)
    assert questions == []


@pytest.mark.parametrize("answer", ["accept", "decline", None])
def test_a_change_is_made_only_if_the_person_says_so(home, answer):
    record = make_record(service="70b", state="ready", updated_at=time.time() - 1e6, job_id="77")
    ServiceStore(home).write(record)
    result, questions = talk(home, lambda session: session.call_tool("stop", {"words": ["nobody's"]}), answer)
    assert result.is_error
    if answer == "accept":
        assert "exit code" in text_of(result), "it was run, and there is no such service"
    else:
        assert "hpc-serve stop 'nobody'\"'\"'s'" in text_of(result)
    assert questions == (["The assistant wants to run: hpc-serve stop 'nobody'\"'\"'s'"] if answer else [])


def test_options_that_write_are_asked_for_and_endless_ones_refused(home, tmp_path):
    async def ask(session):
        words = ["--model", "8b", "--gpu", "h100-80gb", "--plot", str(tmp_path / "plan.html")]
        return await session.call_tool("plan", {"words": words}), await session.call_tool("status", {"words": ["-w"]})

    (drawn, watched), questions = talk(home, ask, "decline")
    assert "declined" in text_of(drawn)
    assert not (tmp_path / "plan.html").exists()
    assert len(questions) == 1
    assert "go on for ever" in text_of(watched)
