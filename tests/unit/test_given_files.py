"""A model's files as a stranger may have made them: pipes, huge ones and deep ones hang and end no reader."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_serve.bench.workload import read_samples
from hpc_serve.errors import InvalidRequestError, SiteFileError
from hpc_serve.given_files import MAX_INDEX_BYTES, parse_json
from hpc_serve.hub.hub import find_model, stored_weights
from hpc_serve.hub.local_weights import damaged_files, missing_weights, snapshot_folder, weight_files
from hpc_serve.hub.needed_files import RepositoryFile
from hpc_serve.job.weights.staging import copy_files
from hpc_serve.quantize.program import CannotQuantizeError, read_texts
from hpc_serve.submit.site.site_files import load_site_models
from tests.support.sites import load_site
from tests.unit.conftest import Ran

INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000
NO_WATCH: dict[str, Any] = {"on_copied": lambda done, total: None, "stop": threading.Event()}
LESS_DEEP = "[" * 500 + "]" * 500  # Python reads it, and a program that walks it may still break


def load_models(path: Path) -> Any:
    return load_site_models(str(path))


def written(folder: Path, text: str) -> Path:
    (folder / "file.yaml").write_text(text)
    return folder / "file.yaml"


def test_a_pipe_in_place_of_weights_hangs_nobody(tmp_path: Path):
    pipe = tmp_path / "a.safetensors"
    os.mkfifo(pipe)
    assert damaged_files((pipe,)) == ("a.safetensors cannot be read (it is no regular file)",)
    assert stored_weights(tmp_path) is None
    (tmp_path / "copy").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        copy_files(tmp_path, tmp_path / "copy", [RepositoryFile(path=pipe.name, size_bytes=9)], **NO_WATCH)


def test_a_pipe_in_place_of_any_other_file_of_a_model_hangs_nobody(tmp_path: Path):
    (tmp_path / "models--org--model" / "refs").mkdir(parents=True)
    os.mkfifo(tmp_path / "models--org--model" / "refs" / "main")
    assert snapshot_folder(tmp_path, "org/model", "main") is None
    os.mkfifo(tmp_path / INDEX)
    assert missing_weights(tmp_path) is not None
    assert weight_files(tmp_path) == ()
    os.mkfifo(tmp_path / "site.yaml")
    for load in (load_site, load_models):
        with pytest.raises(SiteFileError, match="no regular file"):
            load(tmp_path / "site.yaml")


def test_a_huge_index_is_not_read(tmp_path: Path):
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(8 << 30)  # without a block on the disk
    (tmp_path / "config.json").write_text("{}")
    assert weight_files(tmp_path) == ()
    with pytest.raises(InvalidRequestError, match=f"longer than {MAX_INDEX_BYTES:,} bytes"):
        stored_weights(tmp_path)


@pytest.mark.parametrize("text", [DEEP, LESS_DEEP])
def test_deep_json_is_an_error_of_its_file(tmp_path: Path, text: str):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / INDEX).write_text(text)
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        find_model(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        stored_weights(tmp_path)
    assert damaged_files((tmp_path / "a.safetensors",)) == ("a.safetensors has a header that is not safetensors'",)
    for format_name in ("custom", "sharegpt"):
        with pytest.raises(InvalidRequestError, match="nested too deeply"):
            read_samples(format_name, text, "data.jsonl")
    (tmp_path / "texts.jsonl").write_text(text)
    with pytest.raises(CannotQuantizeError):
        list(read_texts(str(tmp_path / "texts.jsonl"), 1))


DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize("words", [["--hf-overrides", DEEP_OBJECT], ["--compilation-config", DEEP]])
def test_deep_json_of_a_command_line_is_an_error_of_the_person(words: list[str], ran: Ran):
    assert "bug" not in ran(["plan", "--model", "8b", "--", *words], 2).err


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "9" * 4000])
def test_a_header_with_numbers_that_are_none_is_damaged(tmp_path: Path, number: str):
    header = f'{{"x": {{"dtype": "F32", "shape": [1], "data_offsets": [0, {number}]}}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert damaged_files((tmp_path / "a.safetensors",)) or number == "-1e999"
    (tmp_path / "config.json").write_text("{}")
    if number != "9" * 4000:
        with pytest.raises(InvalidRequestError, match="is damaged"):
            stored_weights(tmp_path)


DEEP_YAML = ["[" * 2000, "{a: " * 2000, "- " * 2000, "? " * 2000]


@pytest.mark.parametrize("text", [*DEEP_YAML, "a: " + "x" * 200_000])
def test_yaml_is_bounded(tmp_path: Path, text: str):
    for load in (load_site, load_models):
        with pytest.raises(SiteFileError, match=r"longer than 131,072 bytes|nested more than 20 levels deep"):
            load(written(tmp_path, text))


@pytest.mark.parametrize("value", ["9" * 5000, "2026-99-99", "0x" + "f" * 5000, "1:" * 3000 + "1"])
def test_a_value_of_yaml_that_is_none_is_an_error_of_its_file(tmp_path: Path, value: str):
    for name in ("time", "gpus_per_node", "cpus_per_task", "gpu_memory"):
        with pytest.raises(SiteFileError):
            load_site(written(tmp_path, f"{name}: {value}\n"))
    (model,) = load_models(written(tmp_path, f"- {{name: a, model: b, note: {value}}}\n")).values()
    assert model.note == value


def test_aliases_that_make_short_yaml_long_are_not_written_out(tmp_path: Path):
    lists = "".join(f", &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 18))
    text = f"- {{name: a, model: b, note: [&a0 [x]{lists}]}}\n"
    with pytest.raises(SiteFileError, match="note must be one value"):
        load_models(written(tmp_path, text))
