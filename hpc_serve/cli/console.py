"""The console on which tables and stages are printed: plain, and a broken pipe is left to `main`.

Lines that go to a program or a file are not broken, so that paths stay whole.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table

if TYPE_CHECKING:
    from rich.progress import ProgressColumn
    from typing_extensions import Self

_NO_LIMIT = 10_000
"""Columns of what is no terminal."""
_LEAST_FOLDED = 16
"""Columns of a terminal that a folded column needs to be read."""


class PlainConsole(Console):
    """A console that prints text as it is. It leaves a broken pipe to `main`, like everything else that is printed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _NO_LIMIT

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_table(*headings: str, right: Collection[str] = (), folded: Collection[str] = (), padding: int = 1) -> Table:
    """Return an empty table without a frame. `right` are aligned so; `folded` may take several lines of the screen.

    `padding`: blanks at each side of a cell.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding), pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading not in folded,
            overflow="fold" if heading in folded else "ellipsis",
        )
    return table


def print_table(
    rows: Sequence[Mapping[str, RenderableType]],
    *,
    right: Collection[str] = (),
    folded: Collection[str] = (),
    if_wide: str = "",
) -> None:
    """Print rows of cells by their headings, as `plain_table` places them.

    Column `if_wide` is left out where it would leave a folded column too little room.
    """
    console = PlainConsole()
    whole = [heading for heading in rows[0] if heading not in folded]
    taken = sum(
        2 + max(console.measure(row[heading]).maximum for row in ({heading: heading}, *rows)) for heading in whole
    )
    is_wide = taken + _LEAST_FOLDED <= console.width
    headings = [heading for heading in rows[0] if heading != if_wide or is_wide]
    table = plain_table(*headings, right=right, folded=folded)
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    console.print(table)


class ChangingLine:
    """A line on stderr that changes in place: a spinner, `columns`, and words. Without a terminal it shows nothing."""

    def __init__(self, *columns: ProgressColumn) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn

        self.console = PlainConsole(stderr=True, soft_wrap=True)
        self.is_shown = self.console.is_terminal
        in_one_line = Column(no_wrap=True, overflow="ellipsis")
        words = TextColumn("{task.description}", markup=False, table_column=in_one_line)
        self.progress = Progress(
            *(SpinnerColumn(), *columns, words),
            console=self.console,
            transient=True,
            refresh_per_second=4,
            disable=not self.is_shown,
        )
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def change(self, words: str) -> None:
        """Show other words."""
        self.progress.update(self.task, description=words)
