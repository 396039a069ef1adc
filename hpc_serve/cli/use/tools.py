"""Commands as tools of an assistant, by the Model Context Protocol.

A tool is the command of its name, run as a program with this user's rights. A command that changes something asks the
person first, by the protocol's elicitation, with the line that will be run. What a command does is its own matter.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread
import click
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field

from hpc_serve.cli.main import COMMANDS, cli
from hpc_serve.printable import printable

READS = ("models", "gpus", "plan", "status", "logs", "doctor")
CHANGES = ("submit", "scale", "wake", "stop")
_WRITES = ("--plot", "--bundle", "--preflight")  # options of commands that read, which make a file or a job
_ENDLESS = re.compile(r"--follow|--watch|-[a-z]*[fw][a-z]*")
_LONGEST_S = 600.0
_MOST_CHARACTERS = 60_000


class Consent(BaseModel):
    """What the person is asked before a command changes something."""

    run: bool = Field(default=True, description="Run this command")


def make_server() -> MCPServer:
    """Return the server with a tool for each command."""
    server: MCPServer = MCPServer("hpc-serve", instructions="Large language models as services on a Slurm cluster.")
    for name in (*READS, *CHANGES):
        server.add_tool(_tool(name), name=name, description=_describe(name))
    return server


def _tool(name: str) -> Callable[[list[str], Context], Awaitable[str]]:
    async def run_command(words: list[str], ctx: Context) -> str:
        if changes_something(name, words):
            line = printable(shlex.join(["hpc-serve", name, *words])).replace("\n", "\\n")
            try:
                asked = await ctx.elicit(f"The assistant wants to run: {line}", Consent)
            except (MCPError, ValueError) as error:
                raise ToolError(f"The person cannot be asked here ({error}). They can type it: {line}") from error
            if asked.action != "accept" or not asked.data.run:
                raise ToolError(f"The person declined: {line}")
        return await _run(name, words)

    return run_command


def _describe(name: str) -> str:
    """Return what an assistant reads of a command: its help, as a person sees it."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    with click.Context(command, info_name=f"hpc-serve {name}", max_content_width=100) as ctx:
        usage = command.get_help(ctx)
    return f"{COMMANDS[name][1]} `words` are the words behind `hpc-serve {name}`.\n\n{usage}"


def changes_something(name: str, words: Sequence[str]) -> bool:
    """Return whether a command line changes more than what is printed. Raises ToolError for one that has no end.

    A word that only looks like such an option counts, too: then the person is asked once more than needed.
    """
    if any(_ENDLESS.fullmatch(word) for word in words):
        raise ToolError("This would go on for ever: leave out --follow or --watch.")
    if name in CHANGES:
        return list(words) != ["--help"]
    return any(word.startswith(_WRITES) for word in words)


async def _run(name: str, words: Sequence[str]) -> str:
    """Run a command and return what it printed. Raises ToolError with that where it failed.

    A command gets Ctrl-C if the assistant cancels its request or leaves.
    """
    process = _start(name, words)
    try:
        with anyio.fail_after(_LONGEST_S):
            printed = await anyio.to_thread.run_sync(process.communicate, abandon_on_cancel=True)
    except TimeoutError:
        raise ToolError(f"It did not end in {_LONGEST_S:.0f} s and was ended. Look with `status`.") from None
    finally:
        process.send_signal(signal.SIGINT)  # nothing is sent to a process that has ended
    text = b"".join(printed).decode(errors="replace")
    if len(text) > _MOST_CHARACTERS:
        text = f"(the beginning is left out)\n{text[-_MOST_CHARACTERS:]}"
    if process.returncode:
        raise ToolError(f"exit code {process.returncode}\n{text}")
    return text


def _start(name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "hpc_serve.cli", name, *words]
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    try:
        return subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as error:
        raise ToolError(f"These words cannot be run: {error}.") from error
