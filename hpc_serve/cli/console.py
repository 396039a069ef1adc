"""The console on which tables and stages are printed: plain, and a broken pipe is left to `main`.

Lines that go to a program or a file are not broken, so that paths stay whole.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_NO_LIMIT = 10_000
"""Columns of what is no terminal."""
WIDE_ENOUGH = 60
"""Columns from which a list has room for sizes and descriptions."""


class PlainConsole(Console):
    """A console without highlighting. It leaves a broken pipe to `main`, like everything else that is printed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _NO_LIMIT

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def plain_table(*headings: str, right: Collection[str] = (), folded: Collection[str] = ()) -> Table:
    """Return an empty table without a frame. `right` are aligned so; `folded` may take several lines of the screen."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading not in folded,
            overflow="fold" if heading in folded else "ellipsis",
        )
    return table


def progress_line(console: PlainConsole, *columns: ProgressColumn) -> Progress:
    """Return a line that changes in place: a spinner, then `columns`. Without a terminal it shows nothing."""
    from rich.progress import Progress, SpinnerColumn

    is_shown = console.is_terminal
    return Progress(
        SpinnerColumn(), *columns, console=console, transient=True, refresh_per_second=4, disable=not is_shown
    )
