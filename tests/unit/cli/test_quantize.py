"""`quantize` says before the queue what would fail, and follows the job to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4}
# It stands where the environment's Python does.
PYTHON = """#!/bin/bash
while [[ $1 != --output ]]; do shift; done
echo "hpc-serve: loaded"
{does}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    return folder


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "quantize-env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").write_text(f'PATH="{folder}/bin:$PATH"\n')
    monkeypatch.setenv("HPC_SERVE_QUANTIZE_ENV", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def python_that(environment: Path, does: str) -> None:
    program = environment / "bin" / "python"
    program.write_text(PYTHON.format(does=does))
    program.chmod(0o755)


def test_a_folder_is_made_on_this_machine(model, environment, tmp_path, ran):
    python_that(environment, 'mkdir "$2" && echo "{}" > "$2/config.json"')
    out, err = ran(["quantize", str(model), "--int8", "--cluster", "local", "--wait"])
    assert "submitted as job local-" in out
    assert f"hpc-serve submit {tmp_path}/tiny-int8" in out
    assert "hpc-serve: loaded" in err
    assert (tmp_path / "tiny-int8" / "config.json").exists()


def test_a_job_that_makes_nothing_has_failed(model, environment, ran):
    python_that(environment, "echo 'hpc-serve: there is no room'; exit 69")
    said = ran(["quantize", str(model), "--fp8", "--cluster", "local", "--wait"], 6).err
    assert "It last wrote: hpc-serve: there is no room Its log: " in said


def test_slurm_gets_the_script(model, environment, tmp_path, ran):
    said = ran(["quantize", str(model), "--int8", "--partition", "gpu", "--output", "there"]).out
    assert f"makes   {tmp_path}/there" in said
    (script,) = (tmp_path / "home" / "quantize" / "scripts").glob("*.sh")
    assert "#SBATCH --partition=gpu" in script.read_text()
    assert script.stat().st_mode & 0o077 == 0


def test_what_would_fail_is_said_before_the_queue(model, environment, tmp_path, monkeypatch, ran):
    def refused(*words: str) -> str:
        return ran(["quantize", *words], 2).err

    name = str(model)
    assert "--int8 or --fp8" in refused(name)
    assert "none of its weights" in refused("405b", "--fp8")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    assert "hpc-serve fetch" not in refused(str(tmp_path / "bare"), "--int8")
    assert "cannot be read" in refused(name, "--int8", "--calibration", "absent.jsonl")
    (tmp_path / "out").mkdir()
    assert "is there already" in refused(name, "--int8", "--output", "out")
    for change, says in (
        ({"quantization_config": {}}, "is quantised already"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "is a LlavaForConditionalGeneration"),
    ):
        (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
        assert says in refused(name, "--int8")
    (model / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("HPC_SERVE_QUANTIZE_ENV", str(tmp_path / "nowhere"))
    assert "envs/quantize/requirements.txt" in refused(name, "--int8")
    assert not (tmp_path / "home" / "quantize").exists()
