"""Counts sentences that a reader may have to read twice, and writes the table of docs/evidence/plain-english.md.

    python -m tests.support.plain_english COMMIT    # compares with the texts of that commit; needs the whole history

Three kinds are counted per 100 sentences of Markdown, docstrings, comments and messages: over 30 words; opening with a
clause as subject (What, Who, Where, Those, That, Of …); pointing back without a noun ("that one", "whose", "so is").
A message is a string of five words or more in the code, or a cause or cure in an ini file of the rules. Docstrings and
markup are none, and each value in a message counts as one word. The count is a reader, not a judge: a sentence that is
counted may be right.
"""

from __future__ import annotations

import ast
import configparser
import io
import re
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tests.support.arguments import given_words

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "evidence" / "plain-english.md"
TEXTS = {
    "README.md and the pages for users": ("README.md", "docs/index.md", "docs/start", "docs/guides", "docs/understand"),
    "generated reference": ("docs/reference",),
    "design and ARCHITECTURE.md": ("docs/design", "ARCHITECTURE.md"),
    "evidence": ("docs/evidence",),
    "CONTRIBUTING.md and SECURITY.md": ("CONTRIBUTING.md", "SECURITY.md"),
    "hpc_serve: docstrings and comments": ("hpc_serve",),
}
MESSAGES = "hpc_serve: messages"
OPENS = re.compile(
    r"(What|Who|Whoever|Whose|Whichever|Those|That which|That|Of|Where|From|Without|With|Beside|So)\b(?!.*\?$)",
    re.DOTALL,
)
BACK = re.compile(
    r"\b(that one|those that|of its own|the same (goes|holds)|and so (is|are|does)|so is|of which|whose|in which"
    r"|for which|is one that|of the other|as it is|it does not|the one that)\b",
    re.IGNORECASE,
)
LONGEST, SHORTEST = 30, 4
NO_PROSE = re.compile(r"\(\?|\\[dSsw]|</\w+>|[{;][\w-]+:[^ ]|^#!")
"""Regular expressions, markup, style sheets and scripts."""
SHORTEST_MESSAGE = 5
"""Words that make a string a message; a shorter one is a name, a word of a table, or a part of a command."""


@dataclass
class Count:
    """How many sentences there are, and how many of each kind."""

    sentences: int = 0
    long: int = 0
    opens: int = 0
    back: int = 0

    def add(self, sentence: str) -> None:
        words = re.findall(r"[A-Za-z`'][\w`'.-]*", sentence)
        if len(words) < SHORTEST:
            return
        self.sentences += 1
        self.long += len(words) > LONGEST
        self.opens += bool(OPENS.match(sentence))
        self.back += bool(BACK.search(sentence))

    def per_100(self) -> str:
        """Return the three shares, as a row of the table has them."""
        if not self.sentences:
            return "- | - | -"
        return " | ".join(f"{100 * kind / self.sentences:.1f}" for kind in (self.long, self.opens, self.back))


def count(root: Path, names: Iterable[str]) -> Count:
    """Return the count of files and folders below `root`; those that are not there count as empty."""
    found = Count()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".md", ".py") and file.is_file() and file != PAGE:
                for sentence in sentences(file):
                    found.add(sentence)
    return found


def sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a file. Comments of a page that hold the place of a figure are no words of it."""
    source = file.read_text(encoding="utf-8", errors="replace")
    for text in _of_markdown(source) if file.suffix == ".md" else _of_python(source):
        yield from re.split(r"(?<=[.!?:;])\s+", re.sub(r"\s+", " ", text).strip())


def count_messages(package: Path) -> Count:
    """Return the count of the texts that the package's code and rules say to its users."""
    found = Count()
    for _, sentence in messages(package):
        found.add(sentence)
    return found


def messages(package: Path) -> Iterator[tuple[str, str]]:
    """Yield each sentence of a message with its place, as `hpc_serve/errors.py:12`."""
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".ini"):
            source = file.read_text(encoding="utf-8")
            for line, text in _messages_of_python(source) if file.suffix == ".py" else _messages_of_rules(source):
                text = re.sub(r"\s+", " ", text).strip()
                if len(re.findall(r"[A-Za-z][\w'-]*", text)) >= SHORTEST_MESSAGE and not NO_PROSE.search(text):
                    for sentence in re.split(r"(?<=[.!?:;])\s+", text):
                        yield f"{file.relative_to(package.parent)}:{line}", sentence


def _messages_of_rules(source: str) -> Iterator[tuple[int, str]]:
    rules = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",))
    rules.read_string(source)
    for name in rules.sections():
        for kind in ("cause", "cure"):
            if kind in rules[name]:
                yield source[: source.index(f"[{name}]")].count("\n") + 1, re.sub(r"\{\w+\}", "N", rules[name][kind])


def _messages_of_python(source: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(id(node.value))  # a docstring
        elif isinstance(node, ast.Attribute) and node.attr == "split":
            seen.add(id(node.value))  # a list of words
        elif isinstance(node, ast.JoinedStr):
            seen.update(id(part) for part in node.values if isinstance(part, ast.Constant))
            seen.update(id(part.format_spec) for part in node.values if isinstance(part, ast.FormattedValue))
            if id(node) not in seen:
                parts = (part.value if isinstance(part, ast.Constant) else "N" for part in node.values)
                yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield node.lineno, node.value


def _of_markdown(source: str) -> Iterable[str]:
    source = re.sub(r"```.*?```|<!--.*?-->", " ", source, flags=re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=[|#*-])", source)


def _of_python(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield re.sub(r">>>.*", "", ast.get_docstring(node) or "")
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("# "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE) and comment:
            yield " ".join(comment)
            comment = []


def write(commit: str) -> None:
    """Write the page: the texts of a commit, and those of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "--extract", f"--directory={folder}"], input=archive, check=True)
        before = {title: count(Path(folder), names) for title, names in TEXTS.items()}
        before[MESSAGES] = count_messages(Path(folder) / "hpc_serve")
    after = {title: count(CHECKOUT, names) for title, names in TEXTS.items()}
    after[MESSAGES] = count_messages(CHECKOUT / "hpc_serve")
    lines = []
    for title, was in before.items():
        now = after[title]
        lines.append(f"| {title} | {was.sentences} | {was.per_100()} | {now.sentences} | {now.per_100()} |")
    head = PAGE.read_text(encoding="utf-8").partition("\n## The table")[0]
    PAGE.write_text(
        f"{head}\n## The table\n\nCommit {commit} beside the checkout of {datetime.now(timezone.utc):%Y-%m-%d}.\n\n"
        "| text | sentences then | over 30 words | open with a clause | point back "
        "| sentences now | over 30 words | open with a clause | point back |\n"
        "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    write(*given_words(__doc__, 1))
