"""Checks of answers by a function of the person who measures: `--check FILE.py:FUNCTION`.

The function is called after each run, with the body of a request and the text of its answer. It returns the fault in a
few words, or nothing. The function alone decides what an answer should be.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpc_serve.bench.run import Run
from hpc_serve.errors import InvalidRequestError

Check = Callable[[Mapping[str, Any], str], object]


def load_check(words: str) -> Check:
    """Return the function that FILE.py:FUNCTION names. Raises InvalidRequestError."""
    file, _, name = words.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier() or not path.is_file():
        raise InvalidRequestError(f"--check {words} names no function of a file: write mine.py:is_wrong.")
    try:
        function = runpy.run_path(str(path), run_name="hpc_serve_bench_check").get(name)
    except Exception as error:
        raise InvalidRequestError(f"--check {words}: {path} fails with {type(error).__name__}: {error}") from error
    if not callable(function):
        raise InvalidRequestError(f"--check {words}: {path} has no function {name}.")
    check: Check = function
    return check


def wrong_answers(run: Run, check: Check) -> dict[int, str]:
    """Return the faults of answers, by the place of the request. A check that raises is a fault, too."""
    found = {}
    for outcome in run.outcomes:
        if not outcome.is_answered:
            continue
        try:
            wrong = check(run.requests[outcome.place].body, outcome.text)
        except Exception as error:
            wrong = f"the check failed with {type(error).__name__}: {error}"
        if wrong:
            found[outcome.place] = str(wrong)
    return found
