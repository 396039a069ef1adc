"""Whole runs on this machine that end with their preflight: real bash and launcher, and a folder of weights."""

from __future__ import annotations

import json

import pytest

from hpc_serve.exit_codes import PREFLIGHT_EXIT_CODE
from tests.unit.diagnose.cases_of_logs import cause_in


@pytest.fixture
def model(tmp_path):
    """A folder of one file of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    return folder


def test_weights_that_are_cut_short_end_the_start_before_the_engine(start, model):
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 50)
    run = start(variables={"HPC_SERVE_MODEL": str(model)})
    assert run.process.wait(180) == PREFLIGHT_EXIT_CODE, run.log.read_text()
    record = run.record
    assert record is not None
    assert (record.state, record.failed_part, record.exit_code) == ("failed", "preflight", PREFLIGHT_EXIT_CODE)
    found = cause_in(str(record.reason))
    assert found is not None
    assert f"model.safetensors has {size - 50} of its {size} bytes" in found.cause
    assert found.cure.startswith("Download it again")
    assert "engine command" not in run.node_log()
    assert len(list(run.store.service_dir("8b").glob("*.preflight"))) == 1


def test_a_run_that_only_looks_at_its_nodes_ends_well_and_starts_nothing(start, model):
    run = start(variables={"HPC_SERVE_MODEL": str(model)}, preflight_only=True)
    assert run.process.wait(180) == 0, run.log.read_text()
    record = run.record
    assert record is not None
    assert (record.state, record.exit_code) == ("stopped", 0)
    assert str(record.reason).startswith("preflight of 1 node in ")
    assert "engine command" not in run.node_log()
