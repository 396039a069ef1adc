"""The `hpc-serve` command. It imports the file of a command only when that command is used.

Here alone, errors become words on stderr and an exit code (errors.py). If --json is given, stdout holds the error as an
object too.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

import hpc_serve
from hpc_serve.errors import HpcServeError
from hpc_serve.printable import json_text, printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# name: (module below this package, one line of help). The module has the command as NAME_command.
COMMANDS = {
    "init": ("setup.init", "Look at this cluster, and write its site file."),
    "site": ("setup.init", "Show the settings in force, of all site files."),
    "models": ("plan.lists", "List the models of the catalogue."),
    "gpus": ("plan.lists", "List the accelerators that can be named."),
    "fetch": ("setup.fetch", "Fetch a model's weights into the cache that jobs read."),
    "plan": ("plan.plan", "Say what fits where, before anything is queued."),
    "render": ("submit.submit", "Print the batch script."),
    "submit": ("submit.submit", "Start a model as a service."),
    "status": ("services.status", "Show services: where they are, or why not."),
    "wait": ("services.status", "Wait until a service is ready."),
    "top": ("services.top", "Show what all replicas do now, again and again."),
    "logs": ("services.status", "Show what a service's job has written."),
    "doctor": ("doctor.doctor", "Say why a service failed, and what to do about it."),
    "report": ("doctor.report", "Write a page about a service: plan, start, figures."),
    "scale": ("services.change", "Change the number of a service's replicas."),
    "adapter": ("services.change", "Add LoRA adapters to a service, or remove them."),
    "wake": ("services.change", "Bring back a service that is asleep."),
    "stop": ("services.change", "End a service, or one job of it."),
    "forget": ("services.change", "Remove jobs that are over from what status shows."),
    "chat": ("use.access", "Talk to a service."),
    "env": ("use.access", "Print OPENAI_BASE_URL and OPENAI_API_KEY for other tools."),
    "gateway": ("use.gateway", "Serve one address for services: a socket or a port."),
    "key": ("use.gateway", "Make, list or revoke the keys of persons at gateways."),
    "access": ("use.access", "Say how to reach a service from a laptop."),
    "mcp": ("use.mcp", "Let an assistant use these commands, and ask you first."),
    "batch": ("batch", "Answer a file of requests in OpenAI's Batch format."),
    "bench": ("use.bench", "Measure a service: throughput and latency."),
    "quantize": ("setup.quantize", "Make a model's weights 8 bit, in a job."),
    "targets": ("services.targets", "Tell Prometheus where the replicas are."),
    "completion": ("complete", "Print what makes your shell complete words."),
    "help": ("commands", "Show this, or the help of a command."),
    "demo": ("submit.demo", "Serve a tiny model on this machine, ask it, stop it."),
}
INTERRUPTED = 130
BROKEN_PIPE = 141
BUG = 70
# What a full disk, a used-up quota or a broken device says to whoever writes to stdout.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class HelpText(click.HelpFormatter):
    """A help that breaks no line within an option or a path, so that each can be copied."""

    _WHOLE = "\N{NON-BREAKING HYPHEN}"

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", self._WHOLE))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, text.replace("-", self._WHOLE)) for name, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(self._WHOLE, "-")


click.Context.formatter_class = HelpText


class LazyGroup(click.Group):
    """A group that imports a command when it is used. Its own help imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hpc_serve.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            ctx.fail(f"There is no command {args[0]!r}.{guess}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = tuple(args[: args.index("--")] if "--" in args else args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If it fails with --json before it printed its document, print the error as one."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            described = describe_error(error)
            if described is not None and self._owes_json(ctx):
                click.echo(json_text({"error": described[0], "exit_code": described[1]}))
            raise

    def _owes_json(self, ctx: click.Context) -> bool:
        words = ctx.meta["words"]
        if "--json" not in words or "has_answered" in ctx.meta:
            return False
        command = self.get_command(ctx, words[0])
        return command is not None and any("--json" in parameter.opts for parameter in command.params)


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpc_serve.__version__, prog_name="hpc-serve")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Serve large language models on a SLURM cluster: sized, started, found and stopped in one command each."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code."""
    code = run(argv)
    gc.freeze()  # the process ends, so Python need not look for garbage a last time
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    # A terminal without Unicode shows ? for what it lacks. What is no text on stdin is left to the command.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        code = _run(argv)
        if sys.stdout is not None:  # None where whoever started the command has closed it
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`head`, for example) has closed the pipe
        _write_no_more()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _write_no_more()
        click.echo(f"error: the output cannot be written: {error.strerror}.", err=True)
        return 1


def _write_no_more() -> None:
    """Send stdout nowhere: Python would try to write what is left when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="hpc-serve", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit:  # click's own, where the reader of what it prints has gone
        return BROKEN_PIPE
    except (click.Abort, KeyboardInterrupt):
        click.echo("", err=True)
        return INTERRUPTED
    except Exception as error:
        described = describe_error(error)
        if described is None:
            raise
        text, exit_code = described
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx:
            hint = f"\nSee: {error.ctx.command_path} --help"
        elif exit_code == BUG:
            hint = "\nThis is a bug in hpc-serve; HPC_SERVE_DEBUG=1 shows where."
            if os.environ.get("HPC_SERVE_DEBUG"):
                import traceback

                traceback.print_exc()
        click.echo(printable(f"error: {text}{hint}"), err=True)
        return exit_code


def describe_error(error: Exception) -> tuple[str, int] | None:
    """The text for a person and the exit code; None for an exception that is not an error of a command."""
    if isinstance(error, HpcServeError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, (click.Abort, click.exceptions.Exit)):
        return None
    if isinstance(error, OSError) and (isinstance(error, BrokenPipeError) or error.errno in _UNWRITABLE):
        return None
    if isinstance(error, FileNotFoundError) and error.filename is None:  # getcwd() alone names no file
        return "the folder that you are in was removed or moved: cd to another, and try again.", 2
    return f"unexpected {type(error).__name__}: {error}", BUG
