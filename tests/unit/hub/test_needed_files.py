"""Of a repository's files an engine reads some; those are chosen as vLLM chooses its weights."""

from __future__ import annotations

import pytest

from hpc_serve.hub.needed_files import RepositoryFile, has_weights, needed_files

COMMON = ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "modeling_x.py", "LICENSE")
FOR_PEOPLE = (".gitattributes", "README.md", "figures/loss.png", "training.pdf")


def chosen(*paths: str, indexed=(), include=()) -> set[str]:
    files = [RepositoryFile(path=path, size_bytes=1) for path in (*COMMON, *FOR_PEOPLE, *paths)]
    return {file.path for file in needed_files(files, indexed, include=include)} - set(COMMON)


SHARDS = ("a.safetensors", "b.safetensors")
BINS = ("pytorch_model-1.bin", "pytorch_model-2.bin")
FOLDERS = ("model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors")


@pytest.mark.parametrize(
    ("paths", "indexed", "needed"),
    [
        (("model.safetensors", "pytorch_model.bin", "tf_model.h5"), (), {"model.safetensors"}),
        ((*SHARDS, "all.safetensors"), SHARDS, {*SHARDS}),
        (("consolidated.safetensors", "model-1.safetensors"), ("model-1.safetensors",), {"consolidated.safetensors"}),
        (("a.safetensors", "original/consolidated.00.pth", "original/params.json"), (), {"a.safetensors"}),
        ((*BINS, "training_args.bin"), (), {*BINS}),
        (("model.pt", "optimizer.pt"), (), {"model.pt"}),
        (("model.safetensors", "onnx/model.onnx", "onnx/config.json"), (), {"model.safetensors"}),
        (FOLDERS, (), {*FOLDERS}),
        (("x-Q4.gguf",), (), set()),
    ],
)
def test_weights_of_one_format_and_all_small_files(paths, indexed, needed):
    assert chosen(*paths, indexed=indexed) == needed


def test_what_is_asked_for_is_taken():
    assert chosen("a-Q4.gguf", "a-Q8.gguf", include=("*Q8*",)) == {"a-Q8.gguf"}


def test_small_files_come_first_and_are_no_weights():
    files = [RepositoryFile(path=path, size_bytes=1) for path in ("a.safetensors", "config.json")]
    assert [file.path for file in needed_files(files, ())] == ["config.json", "a.safetensors"]
    assert (has_weights(files), has_weights(files[1:])) == (True, False)
