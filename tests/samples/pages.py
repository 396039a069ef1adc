"""The marked places of the documents: `<!-- sample: NAME -->`, and below it the block that a program writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
PLACE = re.compile(r"(<!-- sample: ([\w-]+) -->\n+)```\w*\n.*?^```$", re.DOTALL | re.MULTILINE)


def places() -> Iterator[tuple[Path, str, str]]:
    """Yield each document with a marked place, the sample's name, and the block that stands there."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for found in PLACE.finditer(text):
            yield path, found[2], found[0][len(found[1]) :]


def write(block_of: Callable[[str], str]) -> None:
    """Write every block anew, as `block_of` says for the sample's name."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        renewed = PLACE.sub(lambda found: found[1] + block_of(found[2]), text)
        if renewed != text:
            path.write_text(renewed, encoding="utf-8")


def block(command: str, output: str) -> str:
    """Return a command and what it printed, as the documents show them."""
    return f"```console\n$ {command}\n{output}\n```"
