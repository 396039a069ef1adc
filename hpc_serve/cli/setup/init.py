"""`init` and `site`: the site file that fits this cluster, and what the site files say together."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.commands import FILE, print_json
from hpc_serve.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_serve.submit.init.facts import ClusterFacts
    from hpc_serve.submit.init.places import Setting
    from hpc_serve.submit.site.site_files import MergedSite

_SHOWN = 5
_FIRST_MODEL = "qwen3-8b"  # a small one that needs no licence to be accepted


@click.command("init")
@click.option(
    "--output",
    type=FILE,
    metavar="FILE",
    help="Write it to this file [default: HPC_SERVE_SITE, or ~/.config/hpc-serve/site.yaml].",
)
@click.option("--print", "only_print", is_flag=True, help="Print the file, and write none.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON what was written, with the reasons.")
def init_command(output: Path | None, only_print: bool, force: bool, as_json: bool) -> None:
    """Look at this cluster, and write a site file with a reason for every setting.

    hpc-serve init --print

    It asks Slurm and this host, for half a minute at most, and starts no job. The file has a question for each thing
    that it cannot know. Nothing is set that the system's site file sets.
    """
    from hpc_serve.submit.init.choose import choose_settings
    from hpc_serve.submit.init.look import look
    from hpc_serve.submit.init.places import site_text
    from hpc_serve.submit.site.site import read_settings
    from hpc_serve.submit.site.site_files import find_system_file, user_file

    path = output or user_file(os.environ)
    if not (only_print or force) and os.path.lexists(path):
        raise click.ClickException(
            f"{path} is there already: `hpc-serve site` shows what holds, `hpc-serve init --print` what would be "
            "written now, and --force replaces it."
        )
    system = find_system_file(os.environ)
    above = {name: str(system) for name in read_settings(system)} if system and system != path else {}
    facts = look()
    settings = choose_settings(facts)
    text = site_text(settings, head=_head(facts), above=above)
    if only_print and not as_json:
        click.echo(text, nl=False)
        return
    if not only_print:
        _write(path, text, replace=force)
    if as_json:
        found = {setting.key: {"value": setting.value, "reason": setting.why} for setting in settings}
        print_json({"file": None if only_print else str(path), "settings": found})
        return
    _show(facts, settings)
    click.echo(_next(path, settings))


@click.command("site")
@click.option("--site", "named", metavar="FILE", help="The user's file, as the other commands take it.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def site_command(named: str | None, as_json: bool) -> None:
    """Show the settings in force, and which site file each is from.

    hpc-serve site

    The system's file (/etc/hpc-serve/site.yaml, or HPC_SERVE_SYSTEM_SITE) is read first. Settings of your own win one
    by one, flags over both.
    """
    from hpc_serve.submit.site.site_files import merge_site

    merged = merge_site(os.environ, named)
    if as_json:
        settings = {
            name: {"value": value, "file": str(merged.sources[name])} for name, value in merged.settings.items()
        }
        print_json({"files": [str(file) for file in merged.files], "settings": settings})
    elif not merged.files:
        click.echo("There is no site file: `hpc-serve init` looks at the cluster and writes one.")
    else:
        _show_merged(merged)


def _head(facts: ClusterFacts) -> str:
    slurm = f"Slurm {facts.slurm_version}" if facts.slurm_version else "Slurm did not answer"
    return (
        f"Written by `hpc-serve init` on {facts.host} ({slurm}), {time.strftime('%Y-%m-%d')}.\n"
        "Options of a command win over these settings. A line that begins with `# name:` is a question: take the # "
        "away and write your answer. `hpc-serve site` shows what holds."
    )


def _write(path: Path, text: str, *, replace: bool) -> None:
    from hpc_serve.rendezvous.files import create_private, make_folders, write_private

    try:
        make_folders(path.absolute().parent)
        if replace:
            write_private(path, text)
        elif not create_private(path, text):
            raise click.ClickException(f"{path} has just been made by another program; --force replaces it.")
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror}." if error.strerror else str(error)
        raise click.ClickException(f"{reason} --output FILE writes elsewhere.") from error


def _show(facts: ClusterFacts, settings: Sequence[Setting]) -> None:
    """Print the findings in a few lines."""
    from hpc_serve.submit.init.choose import choose_partition, describe

    decided = {setting.key: setting.value for setting in settings if setting.value is not None}
    chosen = choose_partition(facts)
    rows = [("Slurm", facts.slurm_version or _unanswered(facts, "scontrol show config"))]
    others = [one for one in facts.partitions if one != chosen]
    for one in [*([chosen] if chosen else []), *others[:_SHOWN]]:
        rows.append((f"partition{' *' if one == chosen else ''}", f"{one.name}: {describe(one)}"))
    if len(others) > _SHOWN:
        rows.append(("", f"and {len(others) - _SHOWN} partitions more, see `sinfo`"))
    rows.append(("account", str(decided.get("account") or _unanswered(facts, "sacctmgr"))))
    gpu = decided.get("gpu")
    rows.append(("GPUs", f"{decided.get('gpus_per_node')} x {gpu} a node" if gpu else "not known"))
    rows.append(("Python", str(decided.get("venv") or "no environment with vLLM")))
    if facts.runtimes:
        rows.append(("containers", ", ".join(facts.runtimes)))
    _print_rows(rows)


def _unanswered(facts: ClusterFacts, command: str) -> str:
    reason = facts.unanswered.get(command)
    return f"not known ({reason})" if reason else "not known"


def _next(path: Path, settings: Sequence[Setting]) -> str:
    """The commands to type next; what must be answered before."""
    decided = {setting.key for setting in settings if setting.value is not None}
    lines = [f"Wrote {path}: every setting has its reason, and {len(settings) - len(decided)} are left as questions."]
    if missing := [key for key in ("gpu", "venv") if key not in decided]:
        lines.append(f"Answer first: {', '.join(missing)}. Open the file and look for `# {missing[0]}:`.")
    lines += [
        f"Next:  hpc-serve submit {_FIRST_MODEL} --wait",
        f"       hpc-serve chat {_FIRST_MODEL} {shlex.quote('Why is the sky blue?')}",
        f"       hpc-serve stop {_FIRST_MODEL}",
    ]
    return "\n".join(lines)


def _show_merged(merged: MergedSite) -> None:
    from hpc_serve.submit.init.places import yaml_value

    numbers = {file: f"[{number}]" for number, file in enumerate(merged.files, 1)}
    for file, number in numbers.items():
        click.echo(f"{number} {file}")
    _print_rows([(f"{numbers[merged.sources[name]]} {name}", yaml_value(one)) for name, one in merged.settings.items()])


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    from rich.table import Table

    from hpc_serve.cli.console import PlainConsole

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(printable(name), printable(value))
    PlainConsole().print(table)
