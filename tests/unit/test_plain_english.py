"""The pages for users are read once: few long sentences, clauses as subjects, and words that point back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plain_english import CHECKOUT, PAGE, TEXTS, Count, count, sentences


@pytest.mark.parametrize("title", ["README.md and the pages for users", "design and ARCHITECTURE.md"])
def test_at_most_one_sentence_in_a_hundred_is_hard_to_read(title: str) -> None:
    found = count(CHECKOUT, TEXTS[title])
    assert found.sentences > 500
    assert max(found.long, found.opens, found.back) <= found.sentences / 100, "see docs/evidence/plain-english.md"


def test_the_page_has_a_row_for_every_text() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## The table")[2]
    assert [line.split(" | ")[0] for line in table.splitlines()[6:]] == [f"| {title}" for title in TEXTS]


def test_each_kind_is_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "What it does is its matter. What is it for you?\n\nA file, whose name is long.\n\n"
        f"A {'very ' * 30} long one. Short.\n\n"
        "```\nWhat a block says is code.\n```\n<!-- What a comment says is none. -->\n"
    )
    found = Count()
    for sentence in sentences(page):
        found.add(sentence)
    assert found == Count(sentences=4, long=1, opens=1, back=1)


def test_docstrings_and_comments_are_read_and_examples_are_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Says one thing here."""\n\n# Of two lines\n# one sentence.\nx = "What text says is no comment."\n'
    )
    assert [sentence for sentence in sentences(module) if sentence] == [
        "Says one thing here.",
        "Of two lines one sentence.",
    ]
