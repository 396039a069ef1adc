"""What `hpc-serve plan` says to some words: as text in one line, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tests.unit.conftest import Ran

Told: TypeAlias = Callable[..., str]
Plan: TypeAlias = Callable[..., Any]


@pytest.fixture
def told(ran: Ran) -> Told:
    """The text that `plan` prints, in one line."""
    return lambda *words: " ".join(ran(["plan", *words]).out.split())


@pytest.fixture
def plan_json(ran: Ran) -> Plan:
    """What `plan --json` says, with this exit code."""
    return lambda *words, code=0: json.loads(ran(["plan", "--json", *words], code).out)


@pytest.fixture
def refused(ran: Ran) -> Told:
    """The error of `plan` where words contradict each other, in one line."""
    return lambda *words: " ".join(ran(["plan", *words], 2).err.split())
