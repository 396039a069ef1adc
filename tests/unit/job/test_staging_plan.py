"""Which files of a model are copied to a node, where to, and which command loads the copy."""

from __future__ import annotations

import json
import shutil

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.hub.local_weights import missing_weights, weight_files
from hpc_serve.job.weights.stage_folder import stage_base
from hpc_serve.job.weights.staging import plan_staging
from hpc_serve.vllm.command import StandIn, read_command
from tests.unit.job.test_staging import command, copy, environ, model, planned, safetensors

assert copy, (environ, model)  # fixtures


def test_the_engine_loads_the_copy_and_answers_to_the_models_names(copy, model, environ):
    asked = command(model, "--max-num-seqs", "4")
    assert copy.command(asked).argv == (
        *("vllm", "serve", str(copy.target), "--max-num-seqs", "4"),
        *("--served-model-name", str(model)),
    )
    named = command(model, "--served-model-name", "mine")
    assert copy.command(named).argv == ("vllm", "serve", str(copy.target), "--served-model-name", "mine")
    stand_in = read_command(["vllm", "serve", "org/model"], stand_in=StandIn(folder=str(model)))
    found = plan_staging(stand_in, stage_base(environ), environ)
    assert found.command(stand_in).argv == (
        *("vllm", "serve", str(found.target)),
        *("--served-model-name", "org/model"),
    )


@pytest.mark.parametrize("text", ["", "off", "0"])
def test_without_the_variable_nothing_is_copied(text):
    assert stage_base({"HPC_SERVE_STAGE": text}) is None


def test_on_is_the_folder_of_temporary_files(model, environ, tmp_path):
    found = planned(model, environ | {"HPC_SERVE_STAGE": "on", "HPC_SERVE_TMPDIR": str(tmp_path)})
    assert found.target.parents[1] == tmp_path
    with pytest.raises(InvalidRequestError, match="must be on, off, or a folder"):
        planned(model, {"HPC_SERVE_STAGE": "scratch"})


def test_a_model_that_is_not_here_must_be_fetched_first(environ, tmp_path):
    with pytest.raises(InvalidRequestError, match="`hpc-serve fetch org/model` first"):
        planned("org/model", environ)


def test_a_model_of_the_cache_is_found(model, environ, tmp_path):
    folder = tmp_path / "hf" / "hub" / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    shutil.copytree(model, folder / "snapshots" / "abc", symlinks=True)
    assert planned("org/model", environ).source == folder / "snapshots" / "abc"


@pytest.mark.parametrize("name", ["../outside.safetensors", "{tmp_path}/outside.safetensors"])
def test_files_that_an_index_names_outside_of_the_model_are_not_of_it(model, environ, tmp_path, name):
    (tmp_path / "outside.safetensors").write_bytes(safetensors(b"mine"))
    weights = {"a": name.format(tmp_path=tmp_path), "b": "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert missing_weights(model).files == (weights["a"],)
    assert [path.name for path in weight_files(model)] == ["b.safetensors"]
    assert "a.safetensors" not in {file.path for file in planned(model, environ).files}


def test_a_file_of_the_model_does_not_say_that_its_copy_is_whole(model, environ):
    (model / "ready").write_text("yes")
    assert "ready" not in {file.path for file in planned(model, environ).files}
