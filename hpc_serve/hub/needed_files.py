"""Which files of a repository an engine reads. Pure.

If a repository has weights in several formats, the engine reads the one that vLLM 0.32 prefers (`--load-format auto`):
Mistral's `consolidated*.safetensors`, then the files of the index, other safetensors, `.bin`, `.pt`. All other files
are taken, except files of other programs and files for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

SAFETENSORS_INDEX = "model.safetensors.index.json"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # its name on the hub
# Load formats that read the files of a repository as they are listed here; other formats find weights elsewhere.
FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral")
_OTHER_FOLDERS = ("original/", "onnx/", "openvino/", "coreml/", "metal/", "gguf/", "runs/", ".git")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_NOT_READ = (
    *(".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".tflite", ".mlmodel", ".pdparams"),
    *(".npz", ".tar", ".gz", ".zip", ".7z", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".mp3", ".mp4", ".wav"),
    *(".pdf", ".md", ".gitattributes", ".gitignore"),
)
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")
_DENSE_LAYER = re.compile(r"\d+_\w+/")  # sentence-transformers has weights in folders such as 2_Dense/


@dataclass(frozen=True, kw_only=True)
class RepositoryFile:
    """A file of a repository. `sha256` is known of large files alone."""

    path: str
    size_bytes: int
    sha256: str | None = None


def needed_files(
    files: Collection[RepositoryFile], indexed: Collection[str], *, include: Iterable[str] = ()
) -> tuple[RepositoryFile, ...]:
    """Return the files that an engine reads, and the files that match a pattern of `include`. Small files come first.

    `indexed` are the files of weights that the repository's index of safetensors names.
    """
    weights = set(_weights([file.path for file in files], frozenset(indexed)))
    patterns = tuple(include)

    def is_needed(path: str) -> bool:
        if path in weights or any(fnmatchcase(path, pattern) for pattern in patterns):
            return True
        if path.startswith(_OTHER_FOLDERS) or path.endswith(_NOT_READ):
            return False
        return not path.endswith(_WEIGHTS) or (_DENSE_LAYER.match(path) is not None and bool(weights))

    return tuple(
        sorted((file for file in files if is_needed(file.path)), key=lambda file: (file.path in weights, file.path))
    )


def has_weights(files: Collection[RepositoryFile], *, include: Iterable[str] = ()) -> bool:
    """Return whether the files contain weights in a known format, or in one that `include` names."""
    endings = tuple(f"*{ending}" for ending in _WEIGHTS)
    return any(fnmatchcase(file.path, pattern) for pattern in (*endings, *include) for file in files)


def _weights(paths: list[str], indexed: frozenset[str]) -> list[str]:
    top = [path for path in paths if "/" not in path]
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda path: path.startswith("consolidated") and path.endswith(".safetensors"),
        lambda path: path in indexed,
        lambda path: path.endswith(".safetensors"),
        lambda path: path.endswith(".bin") and path not in _OF_TRAINING,
        lambda path: path.endswith((".pt", ".pth")) and path not in _OF_TRAINING,
    )
    for kind in kinds:
        if found := [path for path in (paths if kind is kinds[1] else top) if kind(path)]:
            return found
    return []
