"""Markdown of text that stands in code: tables, commands, docstrings."""

from __future__ import annotations

import contextlib
import html
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence


def page(title: str, lines: Iterable[str]) -> str:
    """A page that is made of the code."""
    note = "<!-- Made of the code by `python -m tests.support.reference`: change the code, and run that. -->"
    return "\n\n".join([f"# {title}", *lines, note]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown. A | in them parts no columns, neither on GitHub nor in mkdocs."""
    lines = (" | ".join(map(_without_pipes, cells)) for cells in (heads, ["---"] * len(heads), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _without_pipes(text: str) -> str:
    text = re.sub(r"`([^`]*\|[^`]*)`", lambda found: f"<code>{html.escape(found[1], quote=False)}</code>", text)
    return text.replace("|", "&#124;")


def block(text: str, language: str = "bash") -> str:
    """Lines of code, or those that a person types."""
    return f"```{language}\n{text}\n```"


def cell(text: str) -> str:
    """Words as one line of Markdown: outside of code nothing is emphasised, and nothing is HTML."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(re.sub(r"([*<])", r"\\\1", one) if place % 2 == 0 else one for place, one in enumerate(pieces))


def examples(text: str) -> list[str]:
    """The indented parts of a docstring that are Python."""
    return [part for part, is_code in parts(text) if is_code and is_python(part)]


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs of a docstring; indented ones that follow each other are one part, and code."""
    code: list[str] = []
    for paragraph in [*re.split(r"\n\s*\n", inspect.cleandoc(text)), ""]:
        if paragraph.startswith("    "):
            code.append(textwrap.dedent(paragraph))
            continue
        if code:
            yield "\n\n".join(code), True
            code = []
        if paragraph:
            yield paragraph, False


def is_python(text: str) -> bool:
    """Whether it can be read as Python."""
    with contextlib.suppress(SyntaxError):
        compile(text, "example", "exec")
        return True
    return False


def told(text: str) -> list[str]:
    """A docstring as Markdown: its paragraphs, its examples."""
    found = []
    for part, is_code in parts(text):
        if is_code:
            found.append(block(part, "python" if is_python(part) else "text"))
        elif part.startswith(">>>"):
            found.append(block(part, "pycon"))
        elif part.startswith(("hpc-serve ", "eval ")) and "\n" not in part.strip():
            found.append(block(part.strip()))
        else:
            found.append(cell(part))
    return found
