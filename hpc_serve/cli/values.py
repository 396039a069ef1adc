"""How the values of options are written: sizes, times, numbers of replicas."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from hpc_serve.plan.engine import LONGEST_THAT_FITS
from hpc_serve.sizes import parse_size
from hpc_serve.submit.request.bounds import parse_counts
from hpc_serve.vllm.options import read_size


class Written(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A value that is written as one word. A value of another kind, as a default, is taken as it is.

    `read` returns the value of a word. It raises ValueError, with what to write.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _read_tokens(word: str) -> int:
    if word == "auto":
        return LONGEST_THAT_FITS
    try:
        return read_size(word)
    except ValueError:
        raise ValueError(f"{word!r} is no number of tokens: write 131072, 128k, or auto for as many as fit.") from None


def _read_seconds(word: str, *, needs_unit: bool = False) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", word)
    if match is None:
        raise ValueError(f"{word!r} is no time: write seconds, or 90s, 10m, 2h.")
    if needs_unit and not match[2]:
        raise ValueError(f"{word!r} has no unit: write {word}m for minutes, or {word}h, {word}s.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


SIZE = Written("size", parse_size)
"""A number of bytes: 79.2GiB (powers of 1024), 80GB (powers of 1000), or plain."""
TOKENS = Written("tokens", _read_tokens)
"""Tokens: 131072, 128k (128,000) or 128K (131,072) as vLLM reads them, or auto: as many as fit."""
REPLICAS = Written("replicas", parse_counts)
"""A number of replicas, or the least and the most: 4, 1:4. The value is both; None for the second of one number.

h100:2,a100:1 are replicas by kind of machine, a dict.
"""
SECONDS = Written("time", _read_seconds)
"""Seconds, or a number with s, m or h: 90, 90s, 10m, 1.5h."""
TIME_WITH_UNIT = Written("time", partial(_read_seconds, needs_unit=True))
"""The same, where the letter must be there."""
