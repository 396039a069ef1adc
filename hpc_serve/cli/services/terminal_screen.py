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
import tty
from collections.abc import Iterator

from rich.live import Live
from rich.text import Text

from hpc_serve.cli.console import PlainConsole

_VSUSP_OFF = b"\0"


def has_screen() -> bool:
    """Whether stdout and stdin are a terminal on which a cursor can be moved."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The screen while it is ours."""

    def __init__(self, live: Live, keys: int) -> None:
        self._live = live
        self._keys = keys

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown. The lines must fit."""
        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)

    def key(self, *, within_s: float) -> str:
        """Return the next key; "" after `within_s` seconds, and q if nobody can press keys. A key that sends several
        characters counts as the first."""
        if not select.select([self._keys], [], [], within_s)[0]:
            return ""
        return os.read(self._keys, 64).decode(errors="replace")[:1] or "q"


@contextlib.contextmanager
def own_screen() -> Iterator[Screen]:
    """Enter a separate screen. Ctrl-C, SIGTERM and SIGHUP are a KeyboardInterrupt."""
    keys = sys.stdin.fileno()
    settings = termios.tcgetattr(keys)
    # SIGINT too: a shell may have started us with Ctrl-C ignored.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.signal(one, signal.default_int_handler) for one in ends}
    try:
        tty.setcbreak(keys, termios.TCSANOW)
        changed = termios.tcgetattr(keys)
        changed[6][termios.VSUSP] = _VSUSP_OFF  # Ctrl-Z would leave a shell on our screen
        termios.tcsetattr(keys, termios.TCSANOW, changed)
        with Live(console=PlainConsole(), screen=True, auto_refresh=False) as live:
            yield Screen(live, keys)
    finally:
        with contextlib.suppress(termios.error):  # the terminal itself may be gone
            termios.tcsetattr(keys, termios.TCSANOW, settings)
        for one, handler in before.items():
            signal.signal(one, handler)
