"""Hooks of MkDocs: a folder in the menu of mkdocs.yml (`reference/`) stands for all its pages; search ranks pages.

The pages come in the order in which the folder's index.md names them, those that it does not name after them. So a
page that a program or a colleague adds is in the menu, without a line in mkdocs.yml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FOUND_FIRST = {"start": 4, "guides": 4, "understand": 2}
"""By folder, how much the search prefers its pages: most people ask how to do something."""
LINK = re.compile(r"\]\(([\w-]+\.md)[)#]")


def on_config(config: Any) -> None:
    config.nav = [_with_pages(entry, Path(config.docs_dir)) for entry in config.nav]


def on_page_markdown(_: str, page: Any, **__: Any) -> None:
    page.meta.setdefault("search", {"boost": FOUND_FIRST.get(page.file.src_uri.partition("/")[0], 1)})


def _with_pages(entry: Any, docs: Path) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {title: pages(docs / what) if _is_folder(what) else what for title, what in entry.items()}


def pages(folder: Path) -> list[str]:
    """Return the folder's pages as the menu has them, index.md first."""
    index = folder / "index.md"
    named = LINK.findall(index.read_text(encoding="utf-8")) if index.exists() else []
    found = sorted(path.name for path in folder.glob("*.md"))
    order = {name: number for number, name in reversed(list(enumerate(["index.md", *named])))}
    return [f"{folder.name}/{name}" for name in sorted(found, key=lambda name: (order.get(name, len(found)), name))]


def _is_folder(what: Any) -> bool:
    return isinstance(what, str) and what.endswith("/")
