"""The console on which tables and stages are printed: plain, and a broken pipe is left to `main`."""

from __future__ import annotations

from rich.console import Console


class PlainConsole(Console):
    """A console without highlighting. It leaves a broken pipe to `main`, like everything else that is printed."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
