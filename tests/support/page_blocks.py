"""The blocks of the documents that a reader may type or run, and which of their lines do not run here, and why.

A comment before a block says what does not run: `<!-- not run: REASON -->` is the whole block,
`<!-- not run: REASON: WORDS; REASON: WORDS -->` the commands with these words. A block below `<!-- sample: … -->` is
printed by a program (tests/samples), and `text`, `yaml` and the like are no commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("docs/**/*.md")))
REASONS = {
    "cluster": "it needs a cluster; a test or a make target named on the page runs it",
    "minutes": "it runs for minutes or more",
    "network": "it needs a network",
    "endless": "it goes on until somebody ends it",
    "other machine": "it is typed on another machine, or needs its program",
    "beside": "it asks a program that an earlier line keeps running",
    "reference": "tests/unit/test_reference.py runs it, or has click read it",
    "example": "its job number is an example",
    "git": "it needs the whole history",
}
GENERATED = ("docs/reference/command-line.md", "docs/reference/python-api.md")
"""Pages whose examples tests/unit/test_reference.py runs, or has click read."""
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|sample): (?P<words>[^\n]*?) -->\n+)?"
    r"^```(?P<language>bash|console|python)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block: the lines that run here, and the commands that do not, each with its reason."""

    page: str
    number: int
    language: str
    text: str
    runs: str
    left_out: Sequence[tuple[str, str]]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.number}"


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page. Raise ValueError for a reason that is not in REASONS, and for words of no command."""
    for number, found in enumerate(_BLOCK.finditer(text), start=1):
        if found["mark"] == "sample":
            continue
        marks = [_mark(one) for one in (found["words"] or "").split("; ") if one]
        if page in GENERATED:
            marks = [("reference", "")]
        whole = found["language"] == "python"
        commands = [found["text"]] if whole else _commands(found["text"])
        runs, left_out = [], []
        for command in commands:
            reason = next((reason for reason, words in marks if words in command), "")
            if reason and command.strip():
                left_out.append((reason, command))
            else:
                runs.append(command)
        unused = [words for _, words in marks if not any(words in command for command in commands)]
        if unused:
            raise ValueError(f"{page}: no command has the words {unused[0]!r}")
        yield Block(page, number, found["language"], found["text"], "\n".join(runs).strip(), left_out)


def all_blocks() -> Iterator[Block]:
    """Yield the blocks of README and of every page of the site."""
    for page in PAGES:
        yield from blocks(page, (CHECKOUT / page).read_text(encoding="utf-8"))


def _mark(text: str) -> tuple[str, str]:
    reason, _, words = text.partition(": ")
    if reason not in REASONS:
        raise ValueError(f"{reason!r} is no reason; there are: {', '.join(REASONS)}")
    return reason, words


def _commands(text: str) -> list[str]:
    """Return the lines of a block, with those that a backslash continues in one."""
    return re.sub(r"\\\n", "\\\\\0", text).replace("\0", "\n").replace("\\\n", " ").splitlines()
