"""The pages of docs/reference that are made of the code: `python -m tests.support.reference` writes them."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, get_args

import click

from hpc_serve import errors
from hpc_serve.cli import main
from hpc_serve.exit_codes import exit_code_words
from hpc_serve.rendezvous import record
from hpc_serve.rendezvous.fields import field_types
from hpc_serve.rendezvous.store import DrainRequest, PreflightReport, Verdict
from hpc_serve.rendezvous.wanted import Decision, Wanted
from hpc_serve.submit.site.site import SiteProfile
from tests.support.api_page import python_api
from tests.support.arguments import given_words
from tests.support.markdown import block, cell, page, table, told
from tests.support.stubs import make_record

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
STATES = {
    "pending": "The job was submitted, and has published nothing yet.",
    "starting": "The job runs, and its engine is not ready.",
    "ready": "The engine has just answered.",
    "unresponsive": "The engine should answer and does not, or the job runs and does not renew its record.",
    "draining": "It finishes the requests under way, and takes no new ones.",
    "stopped": "It has ended, as it was asked to.",
    "failed": "It has ended otherwise; the record has the reason.",
    "unknown": "Nobody who could tell has answered: neither the scheduler nor the engine.",
}
RECORDS = (
    *(
        record.EndpointRecord,
        record.StartRecord,
        record.NodeRecord,
        record.Progress,
        record.SubmittedJob,
        record.JobEnd,
    ),
    *(DrainRequest, Wanted, Decision, PreflightReport, Verdict),
)


def command_line() -> str:
    """Every command, with its options in their groups."""
    root = click.Context(main.cli, info_name="hpc-serve", **main.cli.context_settings)
    lines = [
        block("hpc-serve --help\nhpc-serve submit --help"),
        "The first lists the commands, the second has what stands here of one.",
        "The [exit codes](exit-codes.md) are the same for all commands.",
        table(
            ("command", "what it does"),
            ((f"[`{name}`](#{name})", line) for name, (_, line) in main.COMMANDS.items()),
        ),
    ]
    for name in main.COMMANDS:
        command = main.cli.get_command(root, name)
        assert command is not None
        context = command.context_class(command, info_name=name, parent=root)
        lines += [
            f"## {name}",
            block(f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}", "text"),
        ]
        lines += told(command.help or "")
        for heading, rows in _options(command, context).items():
            lines += [f"**{heading}**", table(("option", "what it says"), ((f"`{a}`", cell(b)) for a, b in rows))]
    return page("Command line", lines)


def site_file() -> str:
    """Every setting of a site file and what it says."""
    return page(
        "Site file",
        [
            block("hpc-serve init --print\nhpc-serve site"),
            "The site file is YAML, with one `name: value` a line. `hpc-serve init` writes one for your cluster, with "
            "a reason for every setting. `hpc-serve site` shows which settings hold, and which file each is from.",
            "The system's file, `/etc/hpc-serve/site.yaml`, is read first. Yours, `~/.config/hpc-serve/site.yaml`, "
            "wins setting by setting. [Variables](environment-variables.md) and options win over both. An unknown "
            "setting is an error, which names the line.",
            table(("setting", "what it says"), ((f"`{one.name}`", _help(one)) for one in fields(SiteProfile))),
        ],
    )


def records() -> str:
    """The fields of a record and of a submitted job."""
    states = [
        (f"`{name}`", "yes" if name in get_args(record.RecordState) else "", cell(text))
        for name, text in STATES.items()
    ]
    lines = [
        block("hpc-serve status 405b --json"),
        "Each replica has a record: one JSON object in `$HPC_SERVE_HOME/services/<service>/`. "
        "[File formats](file-formats.md) lists the files. A program in Python reads them with "
        "[`hpc_serve.services()`](python-api.md).",
        "## States",
        "A record's state goes `starting`, `ready`, `draining`, `stopped`, or to `failed` from anywhere. An engine "
        "that is started again in place makes it `starting` again, with a `reason`. `unresponsive` is a `ready` that "
        "the replica's own launcher has taken back, until the engine answers again. `status` and the client say more "
        "than a record can:",
        table(("state", "in records", "what it means"), states),
    ]
    for kind in RECORDS:
        lines += [f"## {kind.__name__}", *told(kind.__doc__ or "")]
        if kind is record.EndpointRecord:
            lines.append(block(_sample(), "json"))
        lines.append(_field_table(kind))
    return page("Records", lines)


def exit_codes() -> str:
    """What the exit codes of the commands and of a job's script say, and the tree of errors."""
    tree = inspect.getdoc(errors) or ""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HpcServeError)
    ]
    by_code: dict[int, list[type[errors.HpcServeError]]] = {}
    for kind in kinds:
        by_code.setdefault(kind.exit_code, []).append(kind)
    of_commands = [
        ("0", "It did what was asked."),
        *((str(code), told(found[0].__doc__ or "")[0]) for code, found in sorted(by_code.items())),
        (str(main.BUG), "A bug in hpc-serve; `HPC_SERVE_DEBUG=1` prints where."),
        (str(main.INTERRUPTED), "Ctrl-C. `submit`, `scale`, `wake` and `demo` take SIGTERM and SIGHUP for it."),
        (str(main.BROKEN_PIPE), "The reader of its output, as `head`, has ended."),
    ]
    of_scripts = [
        (str(code), cell(exit_code_words(code))) for code in (*range(1, 129), 137, 143) if exit_code_words(code)
    ]
    first, _, _ = tree.partition("\n\n")
    return page(
        "Exit codes and errors",
        [
            block('hpc-serve wait 405b --timeout 10m || echo "exit code $?"'),
            "Wrong options have exit code 2 as well.",
            "## Of every command",
            table(("code", "what it says"), of_commands),
            "## Of a job's script",
            "Slurm shows it, and so do `status` and `doctor`. A code from 129 on is 128 and the number of the signal.",
            table(("code", "what it says"), of_scripts),
            "## Errors in Python",
            f"{cell(first)} They are in `hpc_serve.errors`.",
            table(
                ("error", "is a", "exit code", "what it says"),
                (
                    (f"`{one.__name__}`", _bases(one), str(one.exit_code), cell(inspect.getdoc(one) or ""))
                    for one in kinds
                ),
            ),
        ],
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "site-file.md": site_file,
    "record.md": records,
    "exit-codes.md": exit_codes,
    "python-api.md": python_api,
}


def _help(setting: Field[Any]) -> str:
    return cell(setting.metadata.get("site_help") or setting.metadata["help"])


class _Rows(click.HelpFormatter):
    """Takes what click would print as help, as rows by heading."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[str, str]]] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._rows = self.found.setdefault(name, [])
        yield

    def write_dl(self, rows: Iterable[tuple[str, str]], *_: Any, **__: Any) -> None:
        self._rows += rows


def _options(command: click.Command, context: click.Context) -> dict[str, list[tuple[str, str]]]:
    formatter = _Rows()
    command.format_options(context, formatter)
    return {
        heading: [row for row in rows if not row[0].endswith("--help")]
        for heading, rows in formatter.found.items()
        if not all(name.endswith("--help") for name, _ in rows)
    }


def _field_table(kind: Any) -> str:
    defaults = {one.name: _default(one) for one in fields(kind)}
    held = {
        name: type_.wanted.replace(f" from 0 to {2**63 - 1}", ", 0 or more") for name, type_, _ in field_types(kind)
    }
    return table(("field", "holds", "default"), ((f"`{name}`", cell(held[name]), defaults[name]) for name in held))


def _sample() -> str:
    """A record as it lies in its file."""
    sample = make_record(
        user="alice",
        hosts=("10.0.0.7",),
        port=41215,
        started_at=1_790_000_000.0,
        updated_at=1_790_000_130.0,
        counter=14,
    )
    return json.dumps(asdict(sample), indent=1, ensure_ascii=False)


def _default(one: Field[Any]) -> str:
    if one.default is not MISSING:
        return f"`{one.default!r}`"
    return "`{}`" if one.default_factory is dict else "" if one.default_factory is MISSING else "its own defaults"


def _bases(kind: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not object)


def write() -> None:
    """Write every page anew."""
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    given_words(__doc__, 0)
    write()
