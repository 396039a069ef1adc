"""The console on which tables and stages are printed: plain, and a broken pipe is left to `main`.

Lines that go to a program or a file are not broken, so that paths stay whole.
"""

from __future__ import annotations

import os

from rich.console import Console

_NO_LIMIT = 10_000
"""Columns of what is no terminal."""


class PlainConsole(Console):
    """A console without highlighting. It leaves a broken pipe to `main`, like everything else that is printed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = _NO_LIMIT

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
