"""Which of a model's weights are on this machine: in a folder, in the Hugging Face cache, or in HPC_SERVE_MODEL.

It reads names of files, the index of a checkpoint, the headers of its files and its tokenizer, and asks no network.
HPC_SERVE_MODEL names a folder that takes the place of a model's weights, for `submit` and for the job alike;
`hpc_serve.vllm` decides what its file of arguments may say. `submit`, before the queue, and the preflight in the job
decide what to do about missing weights.

The variables that say where the cache and the token are, and their order, are those of huggingface_hub 2.4. Its own
functions take 0.17 to 0.25 s of CPU to import on a login node, against 0.08 s for all of hub.py, and bring hf-xet,
fsspec and tqdm. A test compares the two where it is installed. Left out: tokens of OIDC (`HF_OIDC_RESOURCE`), the
renewal of OAuth tokens, and the staging endpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.given_files import is_plain_path, open_regular, parse_json, read_bounded, read_json
from hpc_serve.rendezvous.ownership import check_args_file
from hpc_serve.vllm.arguments import ARGS_FILE, read_args_file
from hpc_serve.vllm.command import StandIn

DEFAULT_ENDPOINT = "https://huggingface.co"
REACH_THE_HUB = (
    "Try again, or on a host that reaches the hub, often a login node. HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror "
    "of the hub."
)
"""What to do where the hub does not answer."""

_TRUE = ("1", "ON", "YES", "TRUE")

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """`cache` is the folder of downloaded repositories; `token` is the one to send, if any, and is printed nowhere."""

    cache: Path
    endpoint: str
    is_offline: bool
    token: str | None = field(repr=False)


def read_hub_settings(environ: Mapping[str, str]) -> HubSettings:
    """Read Hugging Face's variables. An empty variable counts as unset."""
    return HubSettings(
        cache=hub_cache(environ),
        endpoint=(environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
        is_offline=_is_true(environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE")),
        token=_token(_home(environ), environ),
    )


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of downloaded repositories. It reads no file.

    >>> hub_cache({"HF_HOME": "/dev/shm/hf"}).as_posix()
    '/dev/shm/hf/hub'
    """
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return _path(cache or str(_home(environ) / "hub"), environ)


def _home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _path(environ.get("HF_HOME") or f"{base}/huggingface", environ)


def _token(home: Path, environ: Mapping[str, str]) -> str | None:
    if _is_true(environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    if token := _clean(environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or ""):
        return token
    file = _path(environ.get("HF_TOKEN_PATH") or str(home / "token"), environ)
    try:
        return _clean(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _clean(token: str) -> str | None:
    return token.replace("\r", "").replace("\n", "").strip() or None


def _is_true(value: str | None) -> bool:
    return (value or "").upper() in _TRUE


def _path(text: str, environ: Mapping[str, str]) -> Path:
    """Expand `~` and variables as os.path.expanduser and expandvars do, but with the variables of `environ`."""
    if (text == "~" or text.startswith("~/")) and environ.get("HOME"):
        text = environ["HOME"] + text[1:]
    text = os.path.expanduser(text)
    return Path(_VARIABLE.sub(lambda match: environ.get(match[1] or match[2], match[0]), text))


# -- HPC_SERVE_MODEL


def find_stand_in(environ: Mapping[str, str]) -> StandIn | None:
    """Return the folder that HPC_SERVE_MODEL names, with its arguments; None where the variable is not set.

    Raises InvalidRequestError where it is no folder, or its file of arguments cannot be used or is another user's to
    write.
    """
    named = environ.get("HPC_SERVE_MODEL")
    if not named:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise InvalidRequestError(f"HPC_SERVE_MODEL={folder} is not a folder that this node can see.")
    return StandIn(folder=named, args=read_args_file(_text(folder / ARGS_FILE)))


def _text(path: Path) -> str:
    try:
        # O_NONBLOCK: a pipe in the file's place must not hang its reader.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            check_args_file(path, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        return ""
    except InvalidRequestError:  # another user can write it
        raise
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}.") from error


# -- weights

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

# A tokenizer that transformers, mistral_common or a model's own code reads has at least one of these files.
_OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model*", "tekken.json", "vocab.*", "*.tiktoken", "*.spm", "*.vocab", "*.gguf"),
    *("spiece.model", "sentencepiece*.model", "*.bpe.model", "tokenization_*.py"),
)

_SHOWN = 3

_HEADER_LENGTH_BYTES = 8

_LONGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit

_LONGEST_REF_BYTES = 1024

_READERS = 8


@dataclass(frozen=True, kw_only=True)
class MissingWeights:
    """Weights that a checkpoint lacks: `files` that its index names, or all of its weights if that is empty."""

    files: tuple[str, ...] = ()
    of: int = 0

    @property
    def words(self) -> str:
        if not self.files:
            return "none of its weights"
        names = ", ".join(self.files[:_SHOWN]) + (" …" if len(self.files) > _SHOWN else "")
        return f"only {self.of - len(self.files)} of its {self.of} files of weights ({names} missing)"


def cached_folder(repository: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a repository's newest snapshot in the local Hugging Face cache, if it holds a
    config.json."""
    return snapshot_folder(read_hub_settings(environ).cache, repository, "main")


def snapshot_folder(cache: Path, repository: str, revision: str, *, holds: str = "config.json") -> Path | None:
    """Return the folder of a repository at a branch, tag or commit in a cache, if it `holds` that file."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    try:
        commit = read_bounded(folder / "refs" / revision, _LONGEST_REF_BYTES).decode().strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / holds).is_file() else None


def missing_weights(folder: Path | None) -> MissingWeights | None:
    """Return the weights that a folder lacks; None if they are all there. Raises OSError."""
    if folder is None:
        return MissingWeights()
    for name in _INDEXES:
        if (folder / name).is_file():
            files = _indexed(folder, name)
            missing = tuple(file for file, is_there in files.items() if not is_there)
            has_others = len(missing) == len(files) and _has_weights(folder)
            return MissingWeights(files=missing, of=len(files)) if missing and not has_others else None
    return None if _has_weights(folder) else MissingWeights()


def lacks_tokenizer(folder: Path) -> bool:
    """Return whether a folder has none of the files from which an engine reads a tokenizer. Raises OSError."""
    names = os.listdir(folder)
    return not any(fnmatchcase(name, pattern) for name in names for pattern in _OF_TOKENIZERS)


def tokenizer_tokens(folder: Path) -> frozenset[str] | None:
    """Return the tokens that the tokenizer of a folder has; None where no tokenizer.json can be read."""
    try:
        if not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").is_file():
            return None  # vLLM prefers Mistral's own
        whole = read_json(folder / "tokenizer.json")
        vocabulary = whole["model"]["vocab"]  # of Unigram, pairs of a token and its score
        tokens = {*vocabulary} if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
        tokens |= {token["content"] for token in whole.get("added_tokens", ())}
        config = folder / "tokenizer_config.json"
        further = read_json(config) if config.is_file() else {}
        tokens |= {token["content"] for token in further.get("added_tokens_decoder", {}).values()}
        return frozenset(tokens.union(further.get("additional_special_tokens", ())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # vLLM's to say


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of weights that an engine reads: those of the index, else all of the first kind there is.

    Raises OSError.
    """
    for name in _INDEXES:
        indexed = _indexed(folder, name) if (folder / name).is_file() else {}
        if present := tuple(folder / file for file, is_there in indexed.items() if is_there):
            return present
    for pattern in PATTERNS:
        if found := tuple(sorted(folder.glob(pattern))):
            return found
    return ()


def damaged_files(files: tuple[Path, ...]) -> tuple[str, ...]:
    """Return a phrase for each damaged file: it is empty, unreadable, or shorter than its safetensors header says."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and most commands read no files

    with ThreadPoolExecutor(_READERS) as readers:  # each is a round trip to a shared filesystem
        return tuple(f"{path.name} {words}" for path, words in zip(files, readers.map(_damage, files)) if words)


def read_index(index: Path) -> dict[str, Any]:
    """Return an index of weights. Its `weight_map` has the file of each tensor. Raises OSError, ValueError."""
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("it has no weight_map of tensors to files")
    return dict(content)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the tensors in the header of a safetensors file, and where it ends.

    It has eight bytes of length (little endian), then JSON.

    Raises OSError, and ValueError with what is wrong with it.
    """
    with open_regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if not size:
            raise ValueError("it is empty")
        if length > _LONGEST_HEADER_BYTES or size < _HEADER_LENGTH_BYTES + length:
            raise ValueError(f"it ends within its header, after {size:,} bytes")
        try:
            header = dict(parse_json(file.read(length)))
            header.pop("__metadata__", None)
            return header, _HEADER_LENGTH_BYTES + length
        except (TypeError, ValueError):
            raise ValueError("it has a header that is not safetensors'") from None


def _damage(path: Path) -> str:
    try:
        if path.suffix != ".safetensors":
            with open_regular(path) as file:
                return "" if file.read(1) else "is empty"
        header, begin = read_header(path)
        ends = [int(tensor["data_offsets"][1]) for tensor in header.values()]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (IndexError, KeyError, TypeError, OverflowError):
        return "has a header that is not safetensors'"
    except ValueError as error:
        return str(error).removeprefix("it ")
    size, whole = path.stat().st_size, begin + max(ends, default=0)
    return f"has {size:,} of its {whole:,} bytes" if size < whole else ""


def _indexed(folder: Path, index: str) -> dict[str, bool]:
    """Return the files that an index names, and whether each is in the folder: engines read no file outside of it.

    It is empty where the index cannot be used, which is vLLM's to say.
    """
    try:
        names = sorted(set(read_index(folder / index)["weight_map"].values()))
    except ValueError:
        return {}
    return {name: is_plain_path(name) and (folder / name).is_file() for name in names}


def _has_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in PATTERNS)
