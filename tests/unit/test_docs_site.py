"""README is one page, the menu takes folders whole, and the twelve questions are answered two clicks away."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
pages = runpy.run_path(str(CHECKOUT / "envs" / "docs" / "hooks.py"))["pages"]


def test_readme_is_one_page() -> None:
    assert 150 <= len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def test_a_page_opens_with_the_command_that_does_it() -> None:
    for folder in ("start", "guides", "understand"):
        for page in (CHECKOUT / "docs" / folder).glob("*.md"):
            lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line and line[:4] != "<!--"]
            assert lines[0].startswith("# "), page
            assert lines[1] in ("```bash", "```python"), page


def test_the_menu_has_the_pages_as_the_index_names_them_and_the_others_after_them(tmp_path: Path) -> None:
    folder = tmp_path / "guides"
    folder.mkdir()
    (folder / "index.md").write_text("[Two](two.md#part), [one](one.md) and [two](two.md)\n")
    for name in ("zero", "one", "two", "another"):
        (folder / f"{name}.md").write_text("# A page\n")
    names = ("index", "two", "one", "another", "zero")
    assert pages(folder) == [f"guides/{name}.md" for name in names]


QUESTION = re.compile(r"^\| (?P<question>[^|]*\?[^|]*) \| (?P<ways>[^|]*\]\([^|]*) \|$", re.MULTILINE)
WAY = re.compile(r"(?P<tab>[A-Z][a-z ]+), \[(?P<entry>[^]]+)\]\((?P<page>[\w./-]+)(?:#(?P<anchor>[\w-]+))?\)")


def ways(page: str) -> dict[str, list[tuple[str, ...]]]:
    """The questions of a page, each with its ways: tab, entry, page below docs/, anchor."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    return {
        found["question"]: [
            (way["tab"], way["entry"], way["page"], way["anchor"] or "") for way in WAY.finditer(found["ways"])
        ]
        for found in QUESTION.finditer(text)
    }


def test_the_home_page_has_twelve_questions() -> None:
    assert len(ways("docs/index.md")) == 12


@pytest.mark.parametrize(("question", "found"), ways("docs/index.md").items())
def test_a_question_leads_to_a_page_by_its_tab_and_entry(question: str, found: list[tuple[str, ...]]) -> None:
    assert found
    tabs = dict(re.findall(r"^  - ([A-Z][\w ]+): (\w+)/$", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE))
    for tab, entry, page, _ in found:
        assert page in pages(CHECKOUT / "docs" / tabs[tab])
        assert re.search(
            rf"^# {re.escape(entry)}", (CHECKOUT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE
        )
