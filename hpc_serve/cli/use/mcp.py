"""`mcp`: commands as tools of an assistant. The tools themselves are in `tools.py`, which needs the package `mcp`."""

from __future__ import annotations

import click

from hpc_serve.errors import InvalidRequestError


@click.command("mcp")
def mcp_command() -> None:
    """Let an assistant use plan, submit, status, logs, doctor and stop, with your rights.

    hpc-serve mcp

    It speaks the Model Context Protocol on stdin and stdout; an assistant is given this line as an MCP server. A tool
    that changes anything asks you first, and shows the command line. It needs `pip install 'hpc-serve[mcp]'`; vLLM's
    environment has what it needs.
    """
    try:
        from hpc_serve.cli.use.tools import make_server
    except ImportError as error:
        raise InvalidRequestError(
            f"this command needs a package that is not here ({error}): pip install 'hpc-serve[mcp]'"
        ) from error
    try:
        make_server().run("stdio")
    except Exception as error:
        cause: BaseException = error
        while len(found := getattr(cause, "exceptions", [])) == 1:  # a group for each group of tasks that it left
            cause = found[0]
        raise cause from None
