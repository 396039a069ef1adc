"""What `hpc-serve plan` says to some words: as text in one line, and as JSON."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def told(ran):
    """The text that `plan` prints, in one line."""
    return lambda *words: " ".join(ran(["plan", *words]).out.split())


@pytest.fixture
def plan_json(ran):
    """What `plan --json` says, with this exit code."""
    return lambda *words, code=0: json.loads(ran(["plan", "--json", *words], code).out)


@pytest.fixture
def refused(ran):
    """The error of `plan` where words contradict each other, in one line."""
    return lambda *words: " ".join(ran(["plan", *words], 2).err.split())
