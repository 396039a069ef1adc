"""The words that a program of this folder is given; a call for help is not taken for one."""

from __future__ import annotations

import sys


def given_words(about: str | None, *counts: int) -> list[str]:
    """Return the words of the command line. With another number of them, or an option, print `about` and exit."""
    words = sys.argv[1:]
    if any(word.startswith("-") for word in words):
        print(about)
        sys.exit(0 if {"-h", "--help"} & set(words) else 2)
    if len(words) not in counts:
        sys.exit(about)
    return words
