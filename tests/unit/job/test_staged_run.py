"""A whole run whose engine loads a copy of the model: real bash, launcher and files; the engine is the stub."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.unit.job.test_staging import safetensors


@pytest.fixture
def root(tmp_path) -> Path:
    (tmp_path / "scratch").mkdir(mode=0o700)
    return tmp_path / "scratch"


@pytest.fixture
def run(start, tmp_path, root):
    model = tmp_path / "weights"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "a.safetensors").write_bytes(safetensors(os.urandom(100_000)))
    variables = {"HPC_SERVE_MODEL": str(model), "HPC_SERVE_STAGE": str(root), "HPC_SERVE_CANARY_S": "0"}
    return start(variables=variables)


def copies(root: Path) -> list[Path]:
    return sorted(root.glob("hpc-serve-stage-*/*"))


def test_the_engine_loads_the_copy_which_goes_with_the_run(run, root):
    record = run.wait_for_state("ready")
    (copy,) = [path for path in copies(root) if path.is_dir()]
    (engine,) = run.engines()
    words = Path(f"/proc/{engine}/cmdline").read_text().split("\0")
    assert words[words.index("serve") + 1] == str(copy)
    assert (copy / "a.safetensors").read_bytes() == (root.parent / "weights" / "a.safetensors").read_bytes()
    assert "staging" in record.start.took_s
    assert record.loading == f"vLLM's default (lazy): from the copy {copy} on the node"
    assert "meta-llama/Llama-3.1-8B-Instruct" in record.served_model_names
    assert "staging " in run.node_log()
    os.killpg(run.process.pid, signal.SIGINT)
    run.process.wait()
    assert run.wait_for_state("stopped")
    assert copies(root) == []


def test_a_run_that_is_killed_leaves_no_copy(run, root):
    run.wait_for_state("ready")
    assert copies(root)
    os.killpg(run.process.pid, signal.SIGKILL)
    wait_for(lambda: not copies(root), 180, what="the copy is removed")
