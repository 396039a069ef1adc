"""A separate screen for a view that is drawn again and again, with keys read one by one.

The screen before, its cursor and the terminal's settings come back however the view ends, but by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType

from rich.live import Live
from rich.text import Text

from hpc_serve.cli.console import PlainConsole

_VSUSP_OFF = b"\0"


def has_screen() -> bool:
    """Whether stdout and stdin are a terminal on which a cursor can be moved."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The screen while it is ours."""

    def __init__(self, live: Live, keys: int, signals: list[int]) -> None:
        self._live = live
        self._keys = keys
        self._signals = signals

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown. The lines must fit."""
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def key(self, *, until: Callable[[], bool], within_s: float) -> str:
        """Return the next key; "" once `until` is true, or after `within_s` seconds. A key that sends several
        characters counts as the first.

        It is q after a signal that ends the view, and if nobody can press keys.
        """
        ends_at_s = time.monotonic() + within_s
        while not self._signals and not until() and (left_s := ends_at_s - time.monotonic()) > 0:
            if select.select([self._keys], [], [], min(left_s, 0.1))[0]:
                return os.read(self._keys, 64).decode(errors="replace")[:1] or "q"
        return "q" if self._signals else ""


@contextlib.contextmanager
def own_screen() -> Iterator[Screen]:
    """Enter a separate screen. Ctrl-C, SIGTERM and SIGHUP are a key q; a second one is a KeyboardInterrupt."""
    keys = sys.stdin.fileno()
    settings = termios.tcgetattr(keys)
    # SIGINT too: a shell may have started us with Ctrl-C ignored.
    with _noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        try:
            tty.setcbreak(keys, termios.TCSANOW)
            _without_suspend(keys)
            with Live(console=PlainConsole(), screen=True, auto_refresh=False) as live:
                yield Screen(live, keys, signals)
        finally:
            with contextlib.suppress(termios.error):  # the terminal itself may be gone
                termios.tcsetattr(keys, termios.TCSANOW, settings)


def _without_suspend(keys: int) -> None:
    """Ctrl-Z would leave a shell on our screen."""
    settings = termios.tcgetattr(keys)
    settings[6][termios.VSUSP] = _VSUSP_OFF
    termios.tcsetattr(keys, termios.TCSANOW, settings)


@contextlib.contextmanager
def _noted(*signals: signal.Signals) -> Iterator[list[int]]:
    """The signals that came, as they come."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = {one: signal.signal(one, note) for one in signals}
    try:
        yield came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
