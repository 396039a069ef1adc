"""What documents and pages name is there: files, rooms, pages, targets of make."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "README.md", "envs/README.md")
FILE = re.compile(r"`((?:hpc_serve|tests|templates|envs|benchmarks|sbatch|\.ci)/[\w./*-]*)`")
TARGET = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)
PAGES = tuple(str(path.relative_to(CHECKOUT)) for path in sorted(CHECKOUT.glob("docs/**/*.md")))
DESIGN = ("ARCHITECTURE.md", *(page for page in PAGES if page.startswith("docs/design/")))
# A file or a room below hpc_serve/.
OF_THE_CODE = re.compile(r"`([\w/]+\.(?:py|json)|[a-z_]+(?:/[a-z_]+)*/)`")
WRITTEN_WHEN_IT_RUNS = {"service.json", "start_times.json", "wanted.json", "config.json"}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(document: str) -> str:
    return (CHECKOUT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES])
def test_files_and_targets_that_are_named_are_there(document: str) -> None:
    names = [name for name in FILE.findall(text_of(document)) if not any(CHECKOUT.glob(name))]
    known = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert (names, set(TARGET.findall(text_of(document))) - known) == ([], set())


@pytest.mark.parametrize("document", DESIGN)
def test_files_and_rooms_of_the_code_are_there(document: str) -> None:
    names = set(OF_THE_CODE.findall(text_of(document))) - WRITTEN_WHEN_IT_RUNS
    assert names, "it names none at all"
    assert [name for name in names if not any((at / name).exists() for at in (CHECKOUT / "hpc_serve", CHECKOUT))] == []


def test_architecture_has_a_line_for_every_room_of_the_code() -> None:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    packages = setup["options"]["packages"].split()
    rooms = {name.removeprefix("hpc_serve.").replace(".", "/") + "/" for name in packages if "." in name}
    named = set(re.findall(r"^\| `([a-z_/]+/)`", text_of("ARCHITECTURE.md"), re.MULTILINE))
    assert named == rooms - {"templates/"}


def test_architecture_leads_to_every_design_page() -> None:
    linked = {page for page, _ in LINK.findall(text_of("ARCHITECTURE.md"))}
    assert {page for page in DESIGN if page != "ARCHITECTURE.md"} - linked == set()


def anchors(page: Path) -> set[str]:
    """The heads of a page, and of the files that it includes, as links name them."""
    text = page.read_text(encoding="utf-8")
    text += "".join(map(text_of, re.findall(r'^--8<-- "(.*)"$', text, re.MULTILINE)))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", [*DOCUMENTS, *PAGES])
def test_pages_and_heads_that_are_linked_are_there(document: str) -> None:
    for link, anchor in LINK.findall(text_of(document)):
        page = (CHECKOUT / document).parent / link if link else CHECKOUT / document
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), f"{link}#{anchor}"


def test_contributing_names_files_at_all() -> None:
    assert len(FILE.findall(text_of("CONTRIBUTING.md"))) > 20


def test_every_target_is_explained() -> None:
    declared = set(re.findall(r"^\.PHONY: ([a-z-]+)$", text_of("Makefile"), re.MULTILINE)) - {"packages"}
    assert declared == set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.MULTILINE))
