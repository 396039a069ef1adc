"""What unit tests share: a command that is run, and what it printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from hpc_serve.cli.main import run

Ran: TypeAlias = Callable[..., Any]
"""Returns what pytest has captured: `out` and `err`."""


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Run a command, which must end with this exit code, and return what it alone has printed."""

    def run_it(argv: Sequence[str], code: int = 0) -> Any:
        capsys.readouterr()
        assert run(argv) == code
        return capsys.readouterr()

    return run_it
