"""What tests of vLLM's words share: commands that are read, and the installed vLLM, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from hpc_serve.vllm.command import Device, ServeCommand, rank_args, read_command

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


def read(line: str, **options: Any) -> ServeCommand:
    """The command `vllm serve` with these words."""
    return read_command(["vllm", "serve", *line.split()], **options)


def of_node(
    line: str, *, backend: str, num_nodes: int = 1, rank: int = 0, device: Device = "GPU", file: str = "/engine.yaml"
) -> list[str]:
    """What a node of a job is told of its ranks."""
    nodes: dict[str, Any] = {"num_nodes": num_nodes, "node_rank": rank, "master_address": "10.0.0.1"}
    return rank_args(read(line), device=device, backend=backend, settings_file=file, **nodes)
