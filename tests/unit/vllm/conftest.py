"""What tests of vLLM's words share: the installed vLLM, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Ask: TypeAlias = Callable[[str, Any], Any]
"""Hands a value to a program of tests.support, and returns what it answers."""


@pytest.fixture(scope="session")
def ask_vllm() -> Ask:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")

    def ask(program: str, question: Any) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.support.{program}"],
            cwd=Path(__file__).parents[3],
            input=json.dumps(question),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return ask
