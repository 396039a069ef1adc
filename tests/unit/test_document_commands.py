"""Each command of hpc-serve in the blocks of README and the site is one that there is, with options that there are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpc_serve.cli import main
from hpc_serve.vllm.arguments import options as vllm_options

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("docs/**/*.md"))]
TAKE_OPTIONS_OF_VLLM = ("plan", "render", "submit")
BLOCK = re.compile(r"```(?:bash|console)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?:^|&& |\$\(|\$ )hpc-serve ([^#&)\n|]*)", re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    for block in BLOCK.findall(text):
        for words in COMMAND.findall(block.replace("\\\n", " ")):
            yield shlex.split(words)


def unknown(words: list[str]) -> list[str]:
    """Return the words that are no command, or no option of it."""
    if not words or words[0] in ("--help", "--version"):
        return []
    if words[0] not in main.COMMANDS:
        return words[:1]
    known = options_of("submit" if "--preflight" in words else words[0])
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


def options_of(name: str) -> set[str]:
    command = main.cli.get_command(click.Context(main.cli, info_name="hpc-serve"), name)
    assert command is not None
    known = {spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)}
    return {"--", "--help", "--preflight", *known, *(vllm_options() if name in TAKE_OPTIONS_OF_VLLM else ())}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_there_with_their_options(page: str) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    assert [(words, missing) for words in commands(text) if (missing := unknown(words))] == []


def test_commands_are_found_and_wrong_ones_are_named() -> None:
    page = '```bash\nhpc-serve submit 8b --wait   # --no\neval "$(hpc-serve envy 8b)"\nhpc-serve stop 8b --soon\n```'
    assert [unknown(words) for words in commands(page)] == [[], ["envy"], ["--soon"]]
    assert sum(1 for page in PAGES for _ in commands((CHECKOUT / page).read_text(encoding="utf-8"))) > 60
