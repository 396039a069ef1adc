"""A setting as `hpc-serve init` writes it, and the text of the site file: each setting below its reason.

Questions are comments that can be uncommented. Pure.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpc_serve.printable import json_text, printable

Value = str | int | bool | tuple[str, ...] | Mapping[str, str]

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z/~][\w./@%+=-]*")
# Words that some readers of YAML take for something else than a text.
_NOT_TEXT = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """`value` is the decision; None if only a person can know it, and `example` shows what to write.

    `why` says what was seen and what follows from it, or asks the question that the setting answers.
    """

    key: str
    why: str
    value: Value | None = None
    example: Value = ""


def decided(key: str, value: Value, why: str) -> Setting:
    return Setting(key, why, value=value)


def question(key: str, example: Value, why: str) -> Setting:
    return Setting(key, why, example=example)


def site_text(settings: Iterable[Setting], *, head: str, above: Mapping[str, str] | None = None) -> str:
    """Return the whole file. `head` says who wrote it; `above` has the settings of a file that this one is merged with,
    by key, and where each stands: they are not written again.
    """
    parts = [_comment(head)]
    for setting in settings:
        where = (above or {}).get(setting.key)
        is_written = setting.value is not None and where is None
        value = setting.value if setting.value is not None else setting.example
        reason = f"{setting.why} It is set in {where}, which holds unless you set it here." if where else setting.why
        parts.append(f"{_comment(reason)}{'' if is_written else '# '}{setting.key}: {yaml_value(value)}\n")
    return "\n".join(parts)


def yaml_value(value: Value) -> str:
    """Return a value on one line, as YAML.

    >>> yaml_value("h100-80gb"), yaml_value("04:00:00"), yaml_value(("cuda/12.8", "a b")), yaml_value(True)
    ('h100-80gb', '"04:00:00"', '[cuda/12.8, "a b"]', 'true')
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {yaml_value(one)}" for name, one in value.items()) + "}"
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(value).lower()
    is_plain = _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value)
    return value if is_plain else json_text(value)


def _comment(text: str) -> str:
    lines = [line for part in text.split("\n") for line in textwrap.wrap(printable(part), _WIDTH - 2) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
