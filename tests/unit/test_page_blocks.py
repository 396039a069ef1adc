"""Every block of README and the site runs, but for the commands that a comment leaves out with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.page_blocks import PAGES, REASONS, Block, all_blocks, blocks
from tests.support.page_world import PageWorld

FOUND: dict[str, list[Block]] = {page: [] for page in PAGES}
for _block in all_blocks():
    FOUND[_block.page].append(_block)
RUN_HERE = [page for page, found in FOUND.items() if any(block.runs for block in found)]


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    with PageWorld(tmp_path) as world:
        for block in filter(lambda block: block.runs, FOUND[page]):
            done = world.run(block)
            assert done.returncode == 0, f"{block.name}\n{block.runs}\n\n{done.stdout}"


def test_how_many_run_and_how_many_do_not(show_table: Callable[[str], None]) -> None:
    found = [block for page in FOUND.values() for block in page]
    ran = sum(1 for block in found for line in block.runs.splitlines() if line.strip())
    left_out = Counter(reason for block in found for reason, _ in block.left_out)
    lines = [f"{ran:>4}  lines run, in {sum(1 for block in found if block.runs)} of {len(found)} blocks"]
    lines += [f"{count:>4}  not run: {reason}: {REASONS[reason]}" for reason, count in left_out.most_common()]
    show_table("\n".join(lines))
    assert ran > 100


def test_a_comment_leaves_out_a_block_or_commands() -> None:
    text = "<!-- not run: network -->\n```bash\nfetch\n```\n\n```bash\nplan \\\n  a\n```\n"
    text += "<!-- not run: endless: watch; minutes: bench -->\n```bash\nbench a\nplan\nwatch b\n```\n"
    whole, one, parts = blocks("a page", text)
    assert (whole.runs, whole.left_out) == ("", [("network", "fetch")])
    assert one.runs.split() == ["plan", "a"]
    assert (parts.runs, parts.left_out) == ("plan", [("minutes", "bench a"), ("endless", "watch b")])


def test_a_reason_that_nobody_knows_and_words_that_are_not_there_are_errors() -> None:
    with pytest.raises(ValueError, match="no reason"):
        list(blocks("a page", "<!-- not run: lazy -->\n```bash\nplan\n```\n"))
    with pytest.raises(ValueError, match="no command has the words 'bench'"):
        list(blocks("a page", "<!-- not run: minutes: bench -->\n```bash\nplan\n```\n"))
