"""One setting as `hpc-serve init` writes it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = str | int | bool | tuple[str, ...] | Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`value` is the decision; None if only a person can know it, and `example` shows what to write.

    `why` says what was seen and what follows from it, or asks the question that the setting answers.
    """

    key: str
    why: str
    value: Value | None = None
    example: Value = ""
