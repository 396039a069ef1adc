"""An option of a request, declared once: the request's field, the command's option, and its words in a script. Pure.

Click's side is cli/submit/options.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, field
from typing import Any, Literal

from hpc_serve.plan.engine import LONGEST_THAT_FITS
from hpc_serve.sizes import format_size

Kind = Literal["", "size", "tokens", "time", "replicas", "positive", "share", "least_one"]
"""How a value is written; "" by its type alone."""


def option(
    help: str,
    metavar: str | None = None,
    *,
    default: Any = None,
    unset: Any = MISSING,
    kind: Kind = "",
    spelled: tuple[str, ...] = (),
    least: int | None = None,
    of_plan: bool = False,
    group: str = "",
) -> Any:
    """Declare a field that is an option of `submit` and `render`, and of `plan` if `of_plan`.

    `unset` is the command's value for an option left out, if it is not the field's default. A number is at least
    `least`. `group` tells where the `#SBATCH` line of an option of sbatch stands (script/render.py).
    """
    about = {"help": help, "metavar": metavar, "kind": kind, "spelled": spelled, "least": least, "of_plan": of_plan}
    return field(default=default, metadata={**about, "unset": unset, "group": group})


def spellings(one: Field[Any]) -> tuple[str, ...]:
    """Return the option's spellings: its own, else the field's name with hyphens."""
    return one.metadata.get("spelled") or (f"--{one.name.replace('_', '-')}",)


def unset_value(one: Field[Any]) -> Any:
    """Return the value of an option that is left out."""
    unset = one.metadata["unset"] if one.metadata["unset"] is not MISSING else one.default
    return None if unset is MISSING else unset


def option_words(one: Field[Any], value: Any) -> list[str]:
    """Return the words of a command line that give this value; none for an option left out."""
    if value is None or value == unset_value(one):
        return []
    name = spellings(one)[0]
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, _TEXTS.get(one.metadata["kind"], str)(value)]


_TEXTS: Mapping[str, Any] = {
    "size": format_size,
    "time": lambda seconds: f"{seconds:.15g}s",
    "tokens": lambda tokens: "auto" if tokens == LONGEST_THAT_FITS else str(tokens),
}
