"""Where the installed vLLM puts data-parallel ranks, by the words that each node of a job is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.vllm.command import headless_argv
from tests.support.moe_model import CONFIGS
from tests.unit.vllm.conftest import Ask, of_node, read

# By the line, the nodes and the backend: of each node that runs a command the first data-parallel rank, how many there
# are, the node's place within a rank, vLLM's backend, and who balances. vLLM calls a hybrid of one rank each external.
CASES: dict[tuple[str, int, str], list[list[Any]]] = {
    ("-dp 2 -tp 2", 1, "mp"): [[0, 2, 0, "mp", "internal"]],
    ("-dp 4", 2, "mp"): [[0, 2, 0, "mp", "internal"], [2, 2, 0, "mp", "internal"]],
    ("-dp 2 -tp 4", 4, "mp"): [[rank, 1, place, "mp", "internal"] for rank in (0, 1) for place in (0, 1)],
    ("-dp 4 --data-parallel-hybrid-lb", 2, "mp"): [[0, 2, 0, "mp", "hybrid"], [2, 2, 0, "mp", "hybrid"]],
    ("-dp 2 --data-parallel-hybrid-lb", 2, "mp"): [[0, 1, 0, "mp", "external"], [1, 1, 0, "mp", "external"]],
    ("-dp 4", 2, "ray"): [[0, 2, 0, "ray", "internal"]],
}


def words_of_nodes(line: str, num_nodes: int, backend: str, model: Path) -> list[list[str]]:
    command, found = read(f"{model} {line}"), []
    file = str(model / "engine.yaml")
    for node in range(num_nodes if backend == "mp" else 1):
        told = of_node(f"{model} {line}", backend=backend, num_nodes=num_nodes, rank=node, file=file)
        argv = headless_argv(command) if "--headless" in told else command.argv
        found.append([*argv[2:], *told])
    return found


def test_vllm_puts_ranks_where_the_layout_has_them(
    ask_vllm: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2-moe"]))
    (tmp_path / "engine.yaml").write_text("master-port: 20001\ndata-parallel-rpc-port: 20002\n")
    lines = [words for case in CASES for words in words_of_nodes(*case, tmp_path)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ask_vllm("vllm_ranks", lines) == [node for nodes in CASES.values() for node in nodes]
