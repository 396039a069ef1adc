"""Everything that documents name is there: files, targets of make, pages that are linked. ARCHITECTURE has every room."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = tuple(str(path.relative_to(CHECKOUT)) for path in sorted(CHECKOUT.glob("docs/**/*.md")))
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "README.md", "envs/README.md", *PAGES)
FILE = re.compile(r"`((?:hpc_serve|tests|templates|envs|benchmarks|sbatch|\.ci)/[\w./*-]*)`")
# Of the code, on pages that say how it works: below hpc_serve/, a file or a room.
OF_THE_CODE = re.compile(r"`([\w/]+\.(?:py|json)|[a-z_]+(?:/[a-z_]+)*/)`")
DESIGN = ("ARCHITECTURE.md", *(page for page in PAGES if page.startswith("docs/design/")))
WRITTEN = {"service.json", "start_times.json", "elastic.json", "config.json"}
LINK = re.compile(r"\]\(([^)#:\s]+)[^)\s]*\)")
TARGET = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    names = FILE.findall((CHECKOUT / document).read_text(encoding="utf-8"))
    assert [name for name in names if not any(CHECKOUT.glob(name))] == []


@pytest.mark.parametrize("document", DESIGN)
def test_files_and_rooms_of_the_code_are_there(document: str) -> None:
    names = OF_THE_CODE.findall((CHECKOUT / document).read_text(encoding="utf-8"))
    places = (CHECKOUT / "hpc_serve", CHECKOUT)
    assert [name for name in names if name not in WRITTEN and not any((at / name).exists() for at in places)] == []


def test_architecture_has_a_line_for_every_room_of_the_code() -> None:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
    packages = setup["options"]["packages"].split()
    rooms = {name.removeprefix("hpc_serve.").replace(".", "/") + "/" for name in packages if "." in name}
    text = (CHECKOUT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_/]+/)`", text, re.MULTILINE)) == rooms - {"templates/"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_linked_are_there(document: str) -> None:
    path = CHECKOUT / document
    links = LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_targets_that_are_named_are_in_the_makefile(document: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(TARGET.findall((CHECKOUT / document).read_text(encoding="utf-8"))) <= known


def test_contributing_names_files_at_all() -> None:
    assert len(FILE.findall((CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8"))) > 20


def test_every_target_is_explained() -> None:
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    declared = set(re.findall(r"^\.PHONY: ([a-z-]+)$", makefile, re.MULTILINE)) - {"packages"}
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert declared == explained
