from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from hpc_serve.demo_model import SHAPES, VOCAB_SIZE, make_demo_model
from hpc_serve.errors import InvalidRequestError


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = digest(make_demo_model(tmp_path / "a", like="405b", seed=1))
    assert first == digest(make_demo_model(tmp_path / "b", like="405b", seed=1))
    other = digest(make_demo_model(tmp_path / "c", like="405b", seed=2))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize(("like", "tensor", "pipeline"), [("405b", 8, 2), ("70b", 4, 1)])
def test_the_large_model_s_layout_divides_its_likeness(like: str, tensor: int, pipeline: int) -> None:
    shape = SHAPES[like]
    assert shape.num_attention_heads % tensor == shape.num_key_value_heads % tensor == 0
    assert shape.num_hidden_layers % pipeline == 0


def test_weights_fill_the_file_as_its_header_says(tmp_path: Path) -> None:
    content = (make_demo_model(tmp_path, like="8b", num_hidden_layers=3) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(content) - 8 - length
    layers = [name for name in header if name.endswith(".mlp.down_proj.weight")]
    assert layers == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]


def test_every_token_has_one_number(tmp_path: Path) -> None:
    tokenizer = json.loads((make_demo_model(tmp_path) / "tokenizer.json").read_text())
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(VOCAB_SIZE))


def test_another_folder_is_left_alone_and_an_unknown_likeness_lists_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="choose another folder"):
        make_demo_model(tmp_path)
    with pytest.raises(InvalidRequestError, match="405b, 70b, 8b"):
        make_demo_model(tmp_path / "new", like="7b")
    assert not (tmp_path / "new").exists()
