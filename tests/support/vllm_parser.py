"""What the installed vLLM makes of command lines, in a process of its own: it is slow to import and logs much.

Reads {"lines": [[word, …], …]} from stdin. Writes the options of its parser ("options"), what it makes of each line
("readings", null where it refuses one), and the server's middleware where a line names some ("middleware").
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sys
from typing import Any


def main() -> None:
    lines = json.load(sys.stdin)["lines"]
    with contextlib.redirect_stdout(sys.stderr):
        from tests.support.vllm_options import installed_version, read_options

        parser = _parser()
        readings = [_read(parser, words) for words in lines]
        result = {
            "version": installed_version(),
            "options": read_options(),
            "readings": [vars(args) if args else None for args in readings],
            "middleware": asyncio.run(_middleware_of(readings)),
        }
    json.dump(result, sys.stdout, default=str)


def _parser() -> Any:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser


def _read(parser: Any, words: list[str]) -> Any:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return parser.parse_args(["serve", "model", *words])
    except (SystemExit, ValueError, IndexError):
        return None


async def _middleware_of(readings: list[Any]) -> list[list[str]]:
    """Where a reading names some. The server makes its app while its event loop runs, and the gate needs that loop."""
    return [_middleware(args) if args and args.middleware else [] for args in readings]


def _middleware(args: Any) -> list[str]:
    """The outermost first."""
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, ("generate",))
    return [f"{part.cls.__module__}.{part.cls.__qualname__}" for part in app.user_middleware]


if __name__ == "__main__":
    main()
