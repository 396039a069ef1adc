"""What commands share: how the values of options are written, a help in groups, and vLLM's options among ours.

Values are sizes, tokens, times and numbers of replicas. A command with many options has them in groups in its help.
Words that only `vllm serve` knows are passed on to it. `help`, the printing of JSON and the signals that end a command
are here as well.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpc_serve.plan.engine import LONGEST_THAT_FITS
from hpc_serve.printable import json_text
from hpc_serve.submit.request.bounds import parse_counts
from hpc_serve.units import GIB, parse_size
from hpc_serve.vllm.arguments import read_arguments, read_size


def end_as_by_ctrl_c() -> None:
    """From now on SIGTERM, and the SIGHUP of an ssh that ends, are a KeyboardInterrupt: what was begun is undone.

    A shell may send SIGHUP twice: the second is ignored, as what nohup ignores. Only the main thread gets signals.
    """

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(one, interrupt)


# -- the values of options


class Written(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A value that is written as one word. A value of another kind, as a default, is taken as it is.

    `read` returns the value of a word. It raises ValueError, with what to write.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers that refuses `inf` (1e400) and `nan`, which click finds in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def _read_tokens(word: str) -> int:
    if word == "auto":
        return LONGEST_THAT_FITS
    try:
        return read_size(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number of tokens: write 131072, 128k, or auto for as many as fit.") from None


def _read_seconds(word: str, *, needs_unit: bool = False) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", word)
    if match is None:
        raise ValueError(f"{word!r} is no time: write seconds, or 90s, 10m, 2h.")
    if needs_unit and not match[2]:
        raise ValueError(f"{word!r} has no unit: write {word}m for minutes, or {word}h, {word}s.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


SIZE = Written("size", parse_size)
"""A number of bytes: 79.2GiB (powers of 1024), 80GB (powers of 1000), or plain."""
TOKENS = Written("tokens", _read_tokens)
"""Tokens: 131072, 128k (128,000) or 128K (131,072) as vLLM reads them, or auto: as many as fit."""
REPLICAS = Written("replicas", parse_counts)
"""A number of replicas, or the least and the most: 4, 1:4. The value is both; None for the second of one number.

h100:2,a100:1 are replicas by kind of machine, a dict.
"""
SECONDS = Written("time", _read_seconds)
"""Seconds, or a number with s, m or h: 90, 90s, 10m, 1.5h."""
TIME_WITH_UNIT = Written("time", partial(_read_seconds, needs_unit=True))
"""The same, where the letter must be there."""


class PathType(click.Path):
    """A path; an empty word, as an unset variable of a script gives, would be the folder that the command runs in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty (an unset variable?).", param, ctx)
        return super().convert(value, param, ctx)


FILE = PathType(dir_okay=False, path_type=Path)
PATH = PathType(path_type=Path)

# -- commands with many options

VLLM_OPTIONS = {
    "--max-num-seqs N": "Sequences of one step.",
    "--max-num-batched-tokens N": "Tokens of one step.",
    "--gpu-memory-utilization SHARE": "Share of the memory that vLLM may use.",
    "--kv-cache-memory-bytes SIZE": "KV cache (30GiB), in place of that share.",
    "--kv-cache-dtype TYPE": "auto, fp8 …",
    "-q, --quantization METHOD": "Quantises 16-bit weights: fp8, mxfp8 …; `plan` sizes int8, awq, gptq too.",
    "--dtype TYPE": "bfloat16, float16, float32.",
    "--enforce-eager": "No CUDA graphs.",
    "--enable-expert-parallel": "Whole experts to each GPU.",
    "--data-parallel-size N": "Ranks with requests of their own that share the experts.",
    "--decode-context-parallel-size N": "TP ranks that divide each request's cache.",
    "--enable-lora": "Room for LoRA adapters; --max-loras, --max-lora-rank.",
    "--cpu-offload-gb SIZE": "Weights of each GPU in the node's memory (10GiB).",
    "--limit-mm-per-prompt JSON": "Images, videos …: '{\"image\": 0}' loads no tower.",
    "--speculative-config JSON": "Draft model, EAGLE, MTP or n-grams.",
}
"""The options of `vllm serve` that a help names: those that a plan counts."""


_UNITS = {
    "--kv-cache-memory-bytes": 1,
    **dict.fromkeys(("--cpu-offload-gb", "--kv-offloading-size", "--mm-processor-cache-gb"), GIB),
    "--mm-ipc-gpu-memory-gb": GIB,
}
"""Options that are a size of memory, with the bytes of their unit."""


class GroupedCommand(click.Command):
    """A command that shows its options in groups, in the order of the groups.

    `groups` are the names of parameters by heading. Options of no group come last.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)  # --int8 and --fp8 are of one name
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                lines[parameter.name or ""].append(record)
        grouped = {
            heading: [record for name in names for record in lines.pop(name, [])]
            for heading, names in self._groups.items()
        }
        grouped["Other options"] = list(itertools.chain(*lines.values()))
        for heading, found in grouped.items():
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found)


class CommandWithVllmOptions(GroupedCommand):
    """A command that takes the options of `vllm serve` too, before `--` among its own, or after it.

    The words for vLLM are `engine_args` in the context's `meta`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        own, vllms = self._divided(ctx, args[:place])
        ctx.meta["engine_args"] = (*vllms, *args[place + 1 :])
        try:
            return super().parse_args(ctx, own)
        except click.NoSuchOption as error:
            from hpc_serve.vllm.command import closest_option

            near = closest_option(error.option_name, error.possibilities or ())
            if near is None:
                raise
            raise click.NoSuchOption(error.option_name, possibilities=[near], ctx=ctx) from None

    def _divided(self, ctx: click.Context, words: list[str]) -> tuple[list[str], list[str]]:
        """The words of the command's own options and arguments, and those of vLLM's options."""
        ours = {
            spelling: parameter
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            for spelling in (*parameter.opts, *parameter.secondary_opts)
        }
        own: list[str] = []
        vllms: list[str] = []
        while words:
            name, equals, _ = words[0].partition("=")
            if name in ours:
                count, taken = (1 if equals or ours[name].is_flag else 2), own
            elif words[0].startswith("-") and (found := _words_of_vllm(words)):
                count, taken = found, vllms
            else:
                count, taken = 1, own
            taken += words[:count]
            words = words[count:]
        return own, vllms

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Options of vLLM that the plan counts (here or after --, as all of `vllm serve`)"):
            formatter.write_dl(list(VLLM_OPTIONS.items()))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- VLLM_OPTIONS...]"]


def _words_of_vllm(words: Sequence[str]) -> int:
    """How many of these words are an option of vLLM that the first one begins, and its values; 0: it begins none."""
    first = read_arguments(words)[0]
    return len(first.words) - len(first.stray) if first.option is not None else 0


def with_plain_sizes(words: Iterable[str]) -> tuple[str, ...]:
    """The words with sizes such as 30GiB as the number that vLLM takes there: of bytes, or of GiB.

    >>> with_plain_sizes(["--kv-cache-memory-bytes", "30GiB", "--cpu-offload-gb=512MiB", "--max-num-seqs", "4"])
    ('--kv-cache-memory-bytes', '32212254720', '--cpu-offload-gb=0.5', '--max-num-seqs', '4')
    """
    plain: list[str] = []
    for argument in read_arguments(words):
        found, unit = list(argument.words), _UNITS.get(argument.name)
        place = 0 if "=" in found[0] else 1
        if unit and argument.values and argument.values[0][-1:] in ("B", "b"):
            number = f"{parse_size(argument.values[0]) / unit:.15g}"
            found[place] = f"{found[0].partition('=')[0]}={number}" if place == 0 else number
        plain += found
    return tuple(plain)


def print_json(value: Any) -> None:
    """Print one JSON document, a command's only one."""
    click.echo(json_text(value, indent=2))
    click.get_current_context().meta["has_answered"] = True


@click.command("help")
@click.argument("command", required=False)
@click.pass_context
def help_command(ctx: click.Context, command: str | None) -> None:
    """Show all commands, or the help of COMMAND.

    hpc-serve help submit
    """
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    if command is None:
        click.echo(root.get_help())
        return
    name, found, _ = root.command.resolve_command(root, [command])
    assert found is not None
    click.echo(found.get_help(found.context_class(found, info_name=name, parent=root)))
