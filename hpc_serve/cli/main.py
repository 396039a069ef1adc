"""The `hpc-serve` command: finds the file of a command only when that command is used, and turns every error that
hpc-serve raises on purpose into one line and its exit code (see errors.py), here and nowhere else.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import click

import hpc_serve
from hpc_serve.errors import HpcServeError

# name: (module, what it is called there, one line of help)
COMMANDS = {
    "models": ("hpc_serve.cli.models", "models_command", "List the models of the catalogue."),
    "plan": ("hpc_serve.cli.plan", "plan_command", "Say what fits where, before anything is queued."),
    "render": ("hpc_serve.cli.submit", "render_command", "Print the batch script."),
    "submit": ("hpc_serve.cli.submit", "submit_command", "Start a model as a service."),
    "status": ("hpc_serve.cli.watch", "status_command", "Show services: where they are, or why not."),
    "wait": ("hpc_serve.cli.watch", "wait_command", "Wait until a service is ready."),
    "logs": ("hpc_serve.cli.watch", "logs_command", "Show what a service's job has written."),
    "stop": ("hpc_serve.cli.watch", "stop_command", "End a service, or one job of it."),
    "chat": ("hpc_serve.cli.talk", "chat_command", "Talk to a service."),
    "env": ("hpc_serve.cli.talk", "env_command", "Print OPENAI_BASE_URL and OPENAI_API_KEY for other tools."),
    "demo": ("hpc_serve.cli.demo", "demo_command", "Serve a tiny model on this machine, ask it, stop it."),
}
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_BUG = 70


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, and whose own help needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            ctx.fail(f"There is no command {args[0]!r}.{guess}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpc_serve.__version__, prog_name="hpc-serve")
def cli() -> None:
    """Serve large language models on a SLURM cluster: sized, started, found and stopped in one command each."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? for what it lacks
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` say, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="hpc-serve", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except HpcServeError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.UsageError as error:
        hint = f"\nSee: {error.ctx.command_path} --help" if error.ctx else ""
        click.echo(f"error: {error.format_message()}{hint}", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("", err=True)
        return _INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("HPC_SERVE_DEBUG"):
            traceback.print_exc()
        hint = "This is a bug in hpc-serve; HPC_SERVE_DEBUG=1 shows where."
        click.echo(f"error: unexpected {type(error).__name__}: {error}\n{hint}", err=True)
        return _BUG


if __name__ == "__main__":
    main()
