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

# A screen of its own, without a cursor, on which long lines are cut; then back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_VSUSP_OFF = b"\0"


def has_screen() -> bool:
    """Whether stdout and stdin are a terminal on which a cursor can be moved."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Screen:
    """The screen while it is ours."""

    def __init__(self, keys: int, signals: list[int]) -> None:
        self._keys = keys
        self._signals = signals

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown. The lines must fit."""
        text = "".join(f"{line}{_TO_LINE_END}\r\n" for line in lines[:-1]) + "".join(lines[-1:]) + _TO_LINE_END
        sys.stdout.write(f"{_HOME}{text}{_TO_SCREEN_END}")
        sys.stdout.flush()

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
            sys.stdout.write(_ENTER)
            sys.stdout.flush()
            yield Screen(keys, signals)
        finally:
            termios.tcsetattr(keys, termios.TCSANOW, settings)
            with contextlib.suppress(OSError):  # the terminal itself may be gone
                sys.stdout.write(_LEAVE)
                sys.stdout.flush()


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
