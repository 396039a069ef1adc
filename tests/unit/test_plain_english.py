"""The pages for users are read once: few long sentences, clauses as subjects, and words that point back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import plain_english
from tests.support.plain_english import CHECKOUT, MESSAGES, PAGE, TEXTS, Count, messages, sentences


@pytest.mark.parametrize("title", ["README.md and the pages for users", "design and ARCHITECTURE.md"])
def test_at_most_one_sentence_in_a_hundred_is_hard_to_read(title: str) -> None:
    found = plain_english.count(CHECKOUT, TEXTS[title])
    assert found.sentences > 500
    assert max(found.long, found.opens, found.back) <= found.sentences / 100, "see docs/evidence/plain-english.md"


def test_at_most_one_sentence_of_messages_in_two_hundred_is_hard_to_read() -> None:
    found = plain_english.count_messages(CHECKOUT / "hpc_serve")
    assert found.sentences > 2000
    assert max(found.long, found.opens, found.back) <= found.sentences / 200, "see docs/evidence/plain-english.md"


def test_the_page_has_a_row_for_every_text() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## The table")[2]
    assert [line.split(" | ")[0] for line in table.splitlines()[6:]] == [f"| {title}" for title in (*TEXTS, MESSAGES)]


def test_each_kind_is_counted(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text(
        "What it does is its matter. What is it for you?\n\nA file, whose name is long.\n\n"
        f"A {'very ' * 30} long one. Short.\n\n"
        "```\nWhat a block says is code.\n```\n<!-- What a comment says is none. -->\n"
    )
    found = Count()
    for sentence in sentences(page):
        found.add(sentence)
    assert found == Count(sentences=4, long=1, opens=1, back=1)
    module.write_text('"""Says one thing here."""\n\n# Of two lines\n# one sentence.\nx = "What text says."\n')
    assert list(filter(None, sentences(module))) == ["Says one thing here.", "Of two lines one sentence."]


def test_messages_are_read_and_docstrings_names_and_markup_are_not(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text(
        '"""Says what it does in five words."""\n\n'
        'WORDS = "one two three four five six".split()\nPAGE = "<b>No message is in these words</b>"\n'
        'raise ValueError(f"the file {WORDS!r:>9} cannot be read. " "Give it another name.", "a short one")\n'
    )
    (package / "rules.ini").write_text("[rule]\nline = some words of a log line\ncause = {name} has no room left\n")
    assert list(messages(package)) == [
        ("package/module.py:5", "the file N cannot be read."),
        ("package/module.py:5", "Give it another name."),
        ("package/rules.ini:1", "N has no room left"),
    ]
