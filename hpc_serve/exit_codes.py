"""What the exit code of a job's script means, in words. Who ended it, and what follows, is decided by the callers."""

from __future__ import annotations

import signal

_WORDS = {
    75: "a port or folder was taken at each of three starts",
    78: "no Python environment that it may use; HPC_SERVE_ENV or the site file names one",
    126: "a command could not be run",
    127: "a command was not found, in its modules or its Python environment",
}


def exit_code_words(code: int) -> str:
    """What a code says beyond its number; "" for one that says nothing.

    >>> exit_code_words(137), exit_code_words(3)
    ('ended by SIGKILL', '')
    """
    return _WORDS.get(code) or (f"ended by {signal_name(code - 128)}" if 128 < code < 160 else "")


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
