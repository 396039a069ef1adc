"""The text of a site file: each setting below its reason; questions as comments that can be uncommented. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

from hpc_serve.printable import json_text, printable
from hpc_serve.submit.init.setting import Setting, Value

_WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z/~][\w./@%+=-]*")
# Words that some readers of YAML take for something else than a text.
_NOT_TEXT = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


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
    if isinstance(value, (bool, int)):
        return str(value).lower()
    is_plain = _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value)
    return value if is_plain else json_text(value)


def _comment(text: str) -> str:
    lines = [line for part in text.split("\n") for line in textwrap.wrap(printable(part), _WIDTH - 2) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
