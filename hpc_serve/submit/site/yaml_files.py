"""Reads YAML files of people and sites, bounded in size and in depth. Their callers say what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_serve.given_files import read_bounded

_MOST_BYTES = 128 * 1024
_MOST_LEVELS = 20


def read_yaml(path: Path, *, as_nodes: bool = False) -> Any:
    """Return what a YAML file holds, as values or as PyYAML's nodes. Raises OSError and ValueError."""
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
        return (yaml.compose if as_nodes else yaml.load)(text, Loader=BoundedLoader)
    except (yaml.YAMLError, ArithmeticError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
