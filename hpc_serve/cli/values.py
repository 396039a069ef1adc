"""How the values of options are written: sizes, times, numbers of replicas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.engine import LONGEST_THAT_FITS
from hpc_serve.sizes import parse_size
from hpc_serve.submit.request.bounds import parse_replicas
from hpc_serve.vllm.options import read_size

if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType


class Size(_IntType):
    """A number of bytes: 79.2GiB (powers of 1024), 80GB (powers of 1000), or plain."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)


class Context(_IntType):
    """Tokens: 131072, 128k (128,000) or 128K (131,072) as vLLM reads them, or auto: as many as fit."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value == "auto":
            return LONGEST_THAT_FITS
        try:
            return read_size(value)
        except ValueError:
            self.fail(f"{value!r} is no number of tokens: write 131072, 128k, or auto for as many as fit.", param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """Seconds, or a number with s, m or h: 90, 90s, 10m, 1.5h. If `needs_unit`, the letter must be there."""

    name = "time"

    def __init__(self, *, needs_unit: bool = False) -> None:
        self._needs_unit = needs_unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no time: write seconds, or 90s, 10m, 2h.", param, ctx)
        if self._needs_unit and not match[2]:
            self.fail(f"{value!r} has no unit: write {value}m for minutes, or {value}h, {value}s.", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


class Replicas(click.ParamType):  # type: ignore[type-arg]
    """A number of replicas, or the least and the most: 4, 1:4. The value is both; None for the second of one number."""

    name = "replicas"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_replicas(str(value))
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)
