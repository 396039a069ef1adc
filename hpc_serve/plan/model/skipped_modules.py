"""Which modules of a checkpoint are not quantized, by the patterns in its `quantization_config`.

A pattern is a module's name, some dotted parts of it, with `*` for any text, or `re:` and a regular expression. Anybody
can write one: an expression that might take for ever to match is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from hpc_serve.errors import InvalidRequestError

_LONGEST_EXPRESSION = 1000
MOST_EXPRESSIONS = 1000
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+{]")
_MOST_REPETITIONS = 4
"""(a+)+, or many of them in a row: matching may take longer than anybody waits."""


def is_skipped(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the patterns matches a module's name.

    >>> is_skipped("model.layers.3.mlp.gate", ("lm_head", "mlp.gate")), is_skipped("model.gates", ("gate",))
    (True, False)
    """
    names, expression = _matchers(patterns)
    if any(run in names for run in _runs(module)):
        return True
    return expression is not None and expression.search(module) is not None


@lru_cache(maxsize=32)
def _matchers(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Return the patterns that are plain names, and one expression for all other patterns. There may be many names."""
    names: set[str] = set()
    expressions: list[str] = []
    for pattern in patterns:
        if not pattern.startswith("re:") and "*" not in pattern:
            names.add(pattern.strip("."))
        elif len(expressions) == MOST_EXPRESSIONS:
            raise InvalidRequestError(
                f"quantization_config skips modules by more than {MOST_EXPRESSIONS:,} patterns with * or re:."
            )
        elif pattern.startswith("re:"):
            expressions.append(f"(?:^(?:{checked_expression(pattern[3:])}))")
        else:
            text = re.escape(checked_expression(pattern, is_text=True).strip("."))
            expressions.append(r"(?:^|\.)" + re.sub(r"(?:\\\*)+", ".*", text) + r"(?:\.|$)")
    return frozenset(names), re.compile("|".join(expressions)) if expressions else None


def checked_expression(expression: str, *, is_text: bool = False) -> str:
    """Return the expression. Raises InvalidRequestError where it is none, or may take for ever to match."""
    try:
        repeats = len(_REPETITION.findall(expression)) > _MOST_REPETITIONS
        if repeats or len(expression) > _LONGEST_EXPRESSION or (not is_text and _REPEATED_GROUP.search(expression)):
            raise re.error(
                f"it repeats a group, or {_MOST_REPETITIONS + 1} parts, or is longer than {_LONGEST_EXPRESSION} letters"
            )
        if not is_text:
            re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidRequestError(
            f"quantization_config names modules by {expression[:40]!r}, which this planner does not match: {error}."
        ) from None
    return expression


def _runs(module: str) -> Iterator[str]:
    """Return every run of the dotted parts of a name: a.b gives a, a.b and b."""
    parts = module.split(".")
    return (".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))
