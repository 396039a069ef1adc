"""`key`: the keys of persons who ask a gateway."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from hpc_serve.cli.commands import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_serve.gateway.personal_keys import Person
    from hpc_serve.gateway.use import Use

_LIMIT = click.IntRange(1, 2**63 - 1)  # what a file of ours holds


@click.command("key")
@click.argument("action", type=click.Choice(("add", "list", "revoke")))
@click.argument("name", required=False)
@click.option("--max-in-flight", type=_LIMIT, metavar="N", help="With add: requests at once, per gateway.")
@click.option("--tokens-a-day", type=_LIMIT, metavar="N", help="With add: tokens a day, at all gateways.")
@click.option("--json", "as_json", is_flag=True, help="With list: print it as JSON.")
def key_command(
    action: str, name: str | None, max_in_flight: int | None, tokens_a_day: int | None, as_json: bool
) -> None:
    """Make, list or revoke the keys of persons at your gateways.

    hpc-serve key add alice --tokens-a-day 1000000

    A gateway that asks for a key takes these beside its own, at once and without a restart. `add` prints the key, once.
    `list` shows the limits of each person and the use of today. `revoke` takes a key back within 5 seconds.
    """
    from hpc_serve.gateway.personal_keys import add_person, read_people, revoke_key
    from hpc_serve.gateway.use import read_use, today
    from hpc_serve.rendezvous.store import default_home

    if (name is None) != (action == "list"):
        raise click.UsageError("add and revoke need the NAME of one person, and list takes none.")
    if action != "add" and (max_in_flight or tokens_a_day):
        raise click.UsageError("limits are given when a key is made: revoke it, and add it anew.")
    folder = default_home(os.environ) / "gateway"
    if name is None:
        _show(read_people(folder), read_use(folder, today()), as_json=as_json)
    elif action == "add":
        key = add_person(folder, name, max_in_flight=max_in_flight, tokens_a_day=tokens_a_day)
        click.echo(f"This is the key of {name}. It is not shown again.", err=True)
        click.echo(key)
    else:
        revoke_key(folder, name)
        click.echo(f"The key of {name} is revoked. Answers under way still end.", err=True)


def _show(people: Sequence[Person], use: Mapping[str, Use], *, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.text import Text

    from hpc_serve.cli.console import PlainConsole, plain_table
    from hpc_serve.gateway.use import Use

    rows = [{**asdict(person), **asdict(use.get(person.name, Use()))} for person in people]
    if as_json:
        print_json([{name: value for name, value in row.items() if name != "key_sha256"} for row in rows])
        return
    if not rows:
        click.echo("Nobody has a key of their own. To make one: hpc-serve key add NAME")
        return
    numbers = ("max_in_flight", "tokens_a_day", "requests", "prompt_tokens", "completion_tokens")
    headings = ("AT ONCE", "A DAY", "REQUESTS", "PROMPT", "ANSWERS", "GPU H")
    table = plain_table("NAME", "SINCE", *headings, right=headings, folded=("NAME",))
    for row in rows:
        cells = ["any" if row[number] is None else f"{row[number]:,}" for number in numbers]
        cells.append(f"{row['gpu_seconds'] / 3600:.2f}")
        since = time.strftime("%Y-%m-%d", time.localtime(row["since"]))
        table.add_row(*map(Text, (row["name"], since, *cells)))
    PlainConsole().print(table)
    click.echo("A DAY is in tokens. REQUESTS, the tokens of PROMPT and ANSWERS, and the GPU-hours are those of today.")
