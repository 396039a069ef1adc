"""docs/reference is what the code says: each page is current, each example runs, each variable is described."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from dataclasses import fields
from typing import get_args

import click
import pytest

import hpc_serve
from hpc_serve.cli import main
from hpc_serve.client.replicas.status import ReplicaState
from hpc_serve.submit.request.options import JobSettings, variable_of
from hpc_serve.submit.services.want import KEPT
from tests.support.markdown import examples
from tests.support.reference import FOLDER, PAGES, STATES
from tests.support.stubs import StubService
from tests.unit.client.conftest import service
from tests.unit.submit.conftest import slurm
from tests.unit.test_document_commands import check_command, commands

CHECKOUT = FOLDER.parents[1]
PACKAGES = ("hpc_serve", "hpc_serve.client", "hpc_serve.plan", "hpc_serve.submit", "hpc_serve.bench")
# _HPC_SERVE_COMPLETE is click's, for shells.
VARIABLE = re.compile(r"(?<![A-Z_])HPC_SERVE_[A-Z][A-Z_]*[A-Z]")

assert service, slurm  # fixtures


@pytest.mark.parametrize("name", PAGES)
def test_pages_that_are_made_of_the_code_are_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m tests.support.reference`"


def test_every_page_stands_in_the_index() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {path.name for path in FOLDER.glob("*.md")} - {"index.md"}


def test_each_variable_that_the_product_reads_or_sets_is_described_once() -> None:
    files = [*(CHECKOUT / "hpc_serve").rglob("*.py"), *(CHECKOUT / "templates").glob("*.j2")]
    named = {name for path in files for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    settings = {variable_of(setting.name): setting.name for setting in fields(JobSettings)}
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \|(?: .*? \| (yes)? ?\|)?$",
        (FOLDER / "environment-variables.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    described = [name for name, _, _ in rows]
    assert len(described) == len(set(described))
    assert {name for name in described if name.startswith("HPC_SERVE_")} == named | set(settings)
    assert {name for name, _, kept in rows if kept} == set(KEPT)
    in_file = {name: found[1] for name, words, _ in rows if (found := re.search(r"In the site file: `(\w+)`", words))}
    assert in_file == settings | {"HPC_SERVE_LOG_DIR": "log_dir"}


def test_each_state_of_a_replica_is_described() -> None:
    assert tuple(STATES) == get_args(ReplicaState)


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_help_of_each_command_opens_with_an_example_that_it_takes(name: str) -> None:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    _, example, *_ = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    assert f"\n  {example}\n" in command.get_help(click.Context(command, info_name=name, terminal_width=80))
    (words,) = commands(example)
    assert words[0] == name
    check_command(words)


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, service: StubService, slurm: object, capsys: pytest.CaptureFixture[str]) -> None:
    service.start()
    (found,) = examples(importlib.import_module(package).__doc__ or "")
    exec(compile(found, package, "exec"), {"__name__": package})
    printed = capsys.readouterr().out
    assert [line for line in re.findall(r"# (TP=.*)", found) if line not in printed] == []


def test_help_names_every_public_call_and_leads_on() -> None:
    text = pydoc.plain(pydoc.render_doc(hpc_serve))
    described = text[: text.index("PACKAGE CONTENTS")]
    assert [name for name in hpc_serve.__all__ if name not in described] == []
    for package in re.findall(r"help\((hpc_serve\.\w+)\)", described):
        assert pydoc.plain(pydoc.render_doc(package)).startswith("Python Library Documentation")


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there_and_listed(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        getattr(module, "no_such_name")  # noqa: B009
