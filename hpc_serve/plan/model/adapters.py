"""A LoRA adapter by its files, and whether an engine and its model take it. Pure.

vLLM checks the rank and what kind of adapter it is when it loads one. It does not check whether the matrices have the
model's shapes: an engine that gets others breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.spec import DecoderLayer, ModelSpec
from hpc_serve.plan.model.weights import Linear

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank (config/lora.py)."""
ON_CPUS = (
    "On CPUs vLLM 0.32 answers a request for the model itself with an adapter, if a request for one runs at the same "
    "moment. Requests for adapters alone are right."
)
"""vLLM's pull request 48421: the CPU kernel takes "no adapter", -1, for the last slot."""
_MATRIX = re.compile(r"(?P<module>.*\.layers?\.(?P<layer>\d{1,9})\..*)\.lora_(?P<side>[AB])\.weight")
_NOT_OF_DECODER = re.compile(r"visual|vision|audio|\bmtp\.|\.experts\.(base_layer|lora_)")
_REFUSED = {
    "use_dora": "it is a DoRA",
    "lora_bias": "it has a bias",
    "alora_invocation_tokens": "it is an activated LoRA",
    "layer_replication": "it repeats layers",
    "use_bdlora": "it is block-diagonal",
    "use_qalora": "it is a QALoRA",
}
"""Fields of adapter_config.json with which vLLM refuses an adapter: `_validate_features` in its lora/peft_helper.py."""
_HEADS = frozenset({"classifier", "score"})
_PLAIN_BEGINNINGS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What an adapter adds to one matrix of a layer: it takes `inputs` features and gives `outputs`."""

    module: str
    layer: int
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """What the files of an adapter say: its largest rank, the model that it was trained on, and its matrices."""

    path: str
    rank: int
    base: str
    matrices: tuple[Matrix, ...]


def read_adapter(path: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> AdapterFiles:
    """Read an adapter's config and the shapes of its tensors. Raises InvalidRequestError for what vLLM refuses."""
    faults = [words for name, words in _REFUSED.items() if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA":
        faults.append(f"it is of the kind {config['peft_type']}, not LORA")
    if config.get("bias", "none") != "none":
        faults.append(_REFUSED["lora_bias"])
    saved = config.get("modules_to_save") or ()
    if others := sorted(set(map(str, saved if isinstance(saved, list | tuple) else [saved])) - _HEADS):
        faults.append(f"it replaces whole modules ({', '.join(others)})")
    beginning = config.get("init_lora_weights", True)
    if isinstance(beginning, str) and beginning.lower() not in _PLAIN_BEGINNINGS:
        faults.append(f"its beginning {beginning} has changed the weights of its model")
    if faults:
        raise InvalidRequestError(f"vLLM does not take {path}: {'; '.join(faults)}.")
    patterns = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise InvalidRequestError(f"{path}/adapter_config.json: r, and each rank of rank_pattern, must be 1 or more.")
    matrices = tuple(_matrices(path, shapes))
    return AdapterFiles(
        path=path, rank=max(ranks), base=str(config.get("base_model_name_or_path") or ""), matrices=matrices
    )


def _matrices(path: str, shapes: Mapping[str, Sequence[int]]) -> Iterable[Matrix]:
    """Return the pairs of matrices of the decoder's layers: A is (rank, inputs), B is (outputs, rank)."""
    for name, a in shapes.items():
        found = _MATRIX.fullmatch(name)
        if found is None or found["side"] != "A" or _NOT_OF_DECODER.search(name):
            continue
        b = shapes.get(f"{found['module']}.lora_B.weight", ())
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise InvalidRequestError(f"{path}: {found['module']} has no two matrices that fit each other: {a}, {b}.")
        yield Matrix(module=found["module"], layer=int(found["layer"]), inputs=a[1], outputs=b[0])


def least_rank(rank: int) -> int:
    """Return the --max-lora-rank that takes adapters of a rank. Raises InvalidRequestError.

    >>> least_rank(8), least_rank(24)
    (8, 32)
    """
    if rank > RANKS[-1]:
        raise InvalidRequestError(f"An adapter has the rank {rank}, and vLLM takes {RANKS[-1]} at most.")
    return next(one for one in RANKS if one >= rank)


def check_shapes(adapter: AdapterFiles, model: ModelSpec) -> None:
    """Raises InvalidRequestError unless the model has a matrix of that shape for each of the adapter's."""
    for matrix in adapter.matrices:
        if matrix.layer >= len(model.layers):
            fault = f"it changes layer {matrix.layer}, and {model.name} has {len(model.layers)} layers from 0 on"
        elif not _has_shape(model.layers[matrix.layer], matrix):
            fault = (
                f"{matrix.module} takes {matrix.inputs} features and gives {matrix.outputs}, and that layer of "
                f"{model.name} has no such matrix"
            )
        else:
            continue
        trained = f" It was trained on {adapter.base}." if adapter.base else ""
        raise InvalidRequestError(f"{adapter.path} is no adapter of this model: {fault}.{trained}")


def _has_shape(layer: DecoderLayer, matrix: Matrix) -> bool:
    """Whether a layer has such a matrix: one or more neighbours of fused ones, as q, k and v of q, k, v and z."""
    for weight in layer.block.weights:
        if isinstance(weight, Linear) and weight.inputs.size == matrix.inputs:
            ends = list(accumulate((part.size for part in weight.outputs), initial=0))
            if any(end - begin == matrix.outputs for begin, end in combinations(ends, 2)):
                return True
    return False
