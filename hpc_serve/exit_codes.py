"""The meaning of a job script's exit code, in words. Callers decide who ended the job, and what follows."""

from __future__ import annotations

_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
# sysexits.h calls it EX_UNAVAILABLE; 75 and 78 are from there too.
PREFLIGHT_EXIT_CODE = 69
_WORDS = {
    PREFLIGHT_EXIT_CODE: "the preflight found that the engine could not start on these nodes",
    75: "a port or folder was taken at each of three starts",
    78: "no Python environment that it may use; HPC_SERVE_ENV or the site file names one",
    126: "a command could not be run",
    127: "a command was not found, in its modules or its Python environment",
}
_LAST_SIGNAL = 64


def exit_code_words(code: int) -> str:
    """Return the meaning of a code; "" for a code without one.

    >>> exit_code_words(137), exit_code_words(3)
    ('ended by SIGKILL', '')
    """
    if 128 < code <= 128 + _LAST_SIGNAL:
        number = code - 128
        return f"ended by {_SIGNALS.get(number, f'signal {number}')}"
    return _WORDS.get(code, "")
