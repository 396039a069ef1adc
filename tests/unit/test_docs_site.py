"""README is one page, and the menu of the documentation site takes folders whole."""

from __future__ import annotations

import runpy
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
pages = runpy.run_path(str(CHECKOUT / "envs" / "docs" / "hooks.py"))["pages"]


def test_readme_is_one_page() -> None:
    assert 150 <= len((CHECKOUT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def test_a_page_opens_with_the_command_that_does_it() -> None:
    for folder in ("start", "guides", "understand"):
        for page in (CHECKOUT / "docs" / folder).glob("*.md"):
            lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
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
