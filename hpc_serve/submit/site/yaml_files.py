"""Reads YAML files of people and sites, bounded in size and in depth, as the fields of a dataclass.

Values are taken as they are written: YAML would read the time 24:00:00 as the number 86400 and the account 0123 as 83.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from hpc_serve.errors import SiteFileError
from hpc_serve.given_files import read_bounded

if TYPE_CHECKING:
    import yaml

_MOST_BYTES = 128 * 1024
_MOST_LEVELS = 20
_NOTHING = "tag:yaml.org,2002:null"
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


def read_yaml(path: Path) -> yaml.Node | None:
    """Return what a YAML file holds; None for an empty file. Raises OSError and ValueError."""
    import yaml  # not at the top: most commands find no site file, and it takes a twentieth of `plan`

    class BoundedLoader(yaml.SafeLoader):
        """Counts levels while it reads: PyYAML takes seconds for a file of brackets."""

        levels = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            self.levels += 1
            if self.levels > _MOST_LEVELS:
                raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
            node = super().compose_node(parent, index)
            self.levels -= 1
            return node

    text = read_bounded(path, _MOST_BYTES).decode()
    try:
        return yaml.compose(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def place_of(node: yaml.Node, path: Path) -> str:
    """Return where a value stands, for a person."""
    return f"{path}:{node.start_mark.line + 1}"


def fields_of(node: yaml.Node, kind: type, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a mapping by name, with the types that the fields of `kind` have.

    Raises SiteFileError, naming file, line and setting.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise SiteFileError(f"{place_of(node, path)} must hold settings, one `name: value` a line.")
    kinds = get_type_hints(kind)
    seen: set[str] = set()
    for key, value in node.value:
        name, where = str(key.value), place_of(key, path)
        if name not in kinds:
            close = difflib.get_close_matches(name.replace("-", "_"), kinds, n=1)
            guess = f" Did you mean {close[0]}?" if close else ""
            raise SiteFileError(f"{where}: unknown setting {name!r}.{guess} The settings are: {', '.join(kinds)}.")
        if name in seen:
            raise SiteFileError(f"{where}: {name} is set twice; keep one of the two.")
        seen.add(name)
        if kinds[name] == Mapping[str, Mapping[str, Any]]:  # by name, each with settings as this one has
            yield name, {str(one.value): dict(fields_of(its, kind, path)) for one, its in _pairs(value, where)}
        else:
            yield name, _value(value, kinds[name], f"{where}: {name}")


def _pairs(node: yaml.Node, where: str) -> list[tuple[yaml.Node, yaml.Node]]:
    import yaml

    if node.tag == _NOTHING:
        return []
    names = [str(one.value) for one, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if not names or len(set(names)) < len(names):
        raise SiteFileError(f"{where} must have names, each once and with settings: NAME: {{gpu: …}}.")
    return list(node.value)


def _value(node: yaml.Node, kind: Any, where: str) -> Any:
    import yaml

    if kind == tuple[str, ...]:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if all(isinstance(item, yaml.ScalarNode) for item in items):
            return tuple(str(item.value) for item in items if item.value)
        raise SiteFileError(f"{where} must be a list of words, as [one, two].")
    if kind == Mapping[str, str]:
        if node.tag == _NOTHING:
            return {}
        if isinstance(node, yaml.MappingNode) and all(isinstance(one, yaml.ScalarNode) for one in chain(*node.value)):
            return {str(name.value): str(value.value) for name, value in node.value}
        raise SiteFileError(f"{where} must hold variables, as {{NAME: value}}.")
    if not isinstance(node, yaml.ScalarNode):
        raise SiteFileError(f"{where} must be one value, not a list or a mapping.")
    text = str(node.value)
    if node.tag == _NOTHING:
        return None
    if kind == int | None:
        if not re.fullmatch(r"\d{1,9}", text):
            raise SiteFileError(f"{where} is {text!r}: it must be a whole number.")
        return int(text)
    if kind == bool | None:
        if text.lower() not in (*_YES, *_NO):
            raise SiteFileError(f"{where} is {text!r}: it must be true or false.")
        return text.lower() in _YES
    return text
