"""What unit tests share: a command that is run, and what it printed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from hpc_serve.cli.main import run

Ran: TypeAlias = Callable[..., Any]
"""Returns what pytest has captured: `out` and `err`."""
HubAnswers: TypeAlias = Callable[[Callable[[httpx.Request], httpx.Response]], None]
"""Has each request to the hub answered by a function."""


@pytest.fixture(autouse=True)
def _no_runs_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plan as on a site where nothing was measured, whatever the home of whoever tests holds."""
    if "HPC_SERVE_HOME" not in os.environ:
        monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path_factory.getbasetemp() / "empty-home"))


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Run a command, which must end with this exit code, and return what it alone has printed."""

    def run_it(argv: Sequence[str], code: int = 0) -> Any:
        capsys.readouterr()
        assert run(argv) == code
        return capsys.readouterr()

    return run_it


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="hs-share-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> HubAnswers:
    client = httpx.Client
    return lambda handle: monkeypatch.setattr(httpx, "Client", partial(client, transport=httpx.MockTransport(handle)))
