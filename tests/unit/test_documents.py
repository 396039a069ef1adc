"""What the documents for contributors name is there: files, targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "README.md", "envs/README.md")
FILE = re.compile(r"`((?:hpc_serve|tests|templates|envs|benchmarks|sbatch|\.ci)/[\w./*-]*)`")
TARGET = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_are_there(document: str) -> None:
    names = FILE.findall((CHECKOUT / document).read_text(encoding="utf-8"))
    assert [name for name in names if not any(CHECKOUT.glob(name))] == []


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
