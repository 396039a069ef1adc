"""Click takes each command of hpc-serve in the blocks of README and the site, with its options and their values."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpc_serve.cli import main

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"```(?:bash|console)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?:^|&& |\$\(|\$ )hpc-serve ([^#&)\n|>]*)", re.MULTILINE)


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words behind each `hpc-serve` of a block."""
    for words in COMMAND.findall(block.replace("\\\n", " ")):
        yield shlex.split(words)


def check_command(words: list[str]) -> None:
    """Have click read a command. Raises UsageError for what the command does not take."""
    with contextlib.suppress(click.exceptions.Exit):  # --help
        root = main.cli.make_context("hpc-serve", list(words))
        name, command, rest = main.cli.resolve_command(root, words)
        assert command is not None
        command.make_context(name, rest, parent=root)


def commands_of(page: str) -> list[list[str]]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    return [words for block in BLOCK.findall(text) for words in commands(block)]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_taken(page: str) -> None:
    for words in commands_of(page):
        check_command(words)


def test_commands_are_found_and_wrong_ones_are_errors() -> None:
    block = 'hpc-serve submit 8b --wait   # --no\neval "$(hpc-serve envy 8b)"\nhpc-serve stop 8b --soon > x\n'
    good, *wrong = commands(block)
    check_command(good)
    assert wrong == [["envy", "8b"], ["stop", "8b", "--soon"]]
    for words in wrong:
        with pytest.raises(click.UsageError):
            check_command(words)
    assert sum(len(commands_of(page)) for page in PAGES) > 60
