"""Reads what a model's files and an adapter's files say, and holds both against the model of the config. Pure.

The model's files decide about bytes, the config about structure. The comparison leaves out what vLLM does not load:
layers beyond those of the config (multi-token prediction), rotary tables, and an output head that is stored although
it is the embedding.

vLLM checks a LoRA adapter's rank and kind when it loads one. It does not check whether the matrices have the model's
shapes: an engine that gets others breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model.spec import DecoderLayer, Linear, ModelSpec, Vector
from hpc_serve.vllm.arguments import read_arguments, value_of

# -- adapters

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank (config/lora.py)."""
DEFAULT_LORA_RANK = 16
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


def check_room(files: AdapterFiles, engine_args: Sequence[str], engine: str) -> None:
    """Raises InvalidRequestError if an engine with these options takes no such adapter."""
    words = read_arguments(engine_args)
    cure = f"submit it with -- --enable-lora --max-lora-rank {least_rank(files.rank)}"
    if not value_of(words, "--enable-lora"):
        raise InvalidRequestError(f"{engine} started without room for adapters: {cure}, or with --lora NAME=FOLDER.")
    most = value_of(words, "--max-lora-rank") or DEFAULT_LORA_RANK
    if files.rank > most:
        raise InvalidRequestError(
            f"{engine} started for ranks of {most} at most, and {files.path} has {files.rank}: {cure}."
        )


def check_shapes(adapter: AdapterFiles, model: ModelSpec) -> None:
    """Raise InvalidRequestError unless the model has a matrix of that shape for each of the adapter's."""
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
    """Return whether a layer has such a matrix: neighbours of fused ones count, as q, k and v of q, k, v and z."""
    for weight in layer.block.weights:
        if isinstance(weight, Linear) and weight.inputs.size == matrix.inputs:
            ends = list(accumulate((part.size for part in weight.outputs), initial=0))
            if any(end - begin == matrix.outputs for begin, end in combinations(ends, 2)):
                return True
    return False


# -- weights

_TOLERANCE = 0.002
"""Relative difference up to which config and files agree. Small scales and biases do not matter."""

_GRAIN_BYTES = 40_320
"""A layer changes by a multiple of this, which tensor parallel sizes divide: 1 to 10, 12, 14, 16, 32, 64 and 128."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NESTED = re.compile(r"\.(?:nested_absmax|nested_quant_map|quant_map|quant_state\.\w+)$")
_OF_TOWERS = ("vision", "audio_tower.", "model.encoder.")
"""Parts of names of tensors whose layers are those of a tower."""
_ABSMAX_BYTES = 4
"""bitsandbytes may quantize its scales too ("double quantisation"). vLLM undoes that when it loads them."""
_WIDE_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    name: str
    dtype: str
    elements: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What the files of a folder hold: their tensors, or by an index alone the tensors' `names` and bytes in all.

    `size_bytes` is 0 where the index does not say it.
    """

    tensors: tuple[StoredTensor, ...] | None = None
    names: tuple[str, ...] = ()
    size_bytes: int = 0


def match_checkpoint(model: ModelSpec, stored: StoredWeights | None) -> tuple[ModelSpec, str | None]:
    """Return the model with layers of the size that its files have, and a sentence about the difference, if there is
    one.

    A model with an assumed quantization is not that of its files.
    """
    if stored is None or model.quantization.is_assumed:
        return model, None
    if stored.tensors is not None:
        stored_bytes = loaded_bytes(stored.tensors, model)
    elif stored.size_bytes > 0 and _loads_all(stored.names, model):
        stored_bytes = stored.size_bytes
    else:
        return model, None
    computed = model.weight_bytes
    difference = stored_bytes - computed
    if abs(difference) <= _TOLERANCE * computed:
        return model, None
    per_layer = difference // model.num_hidden_layers // _GRAIN_BYTES * _GRAIN_BYTES
    extra = Vector(name="stored beyond the config", size=per_layer, split=True, element_bytes=1)
    sentence = (
        f"The files hold {stored_bytes / 1e9:.2f} GB to load, the config says {computed / 1e9:.2f} GB: "
        "the plan uses the size of the files."
    )
    return model.with_weights(lambda weights: (*weights, extra)), sentence


def loaded_bytes(tensors: Iterable[StoredTensor], model: ModelSpec) -> int:
    """Return the bytes that vLLM loads of these tensors.

    Plain floats become the model's type, all others stay as they are.
    """
    total = 0
    for tensor in tensors:
        if _is_skipped(tensor.name, model) or _NESTED.search(tensor.name):
            continue
        if tensor.name.endswith(".absmax"):
            total += tensor.elements * _ABSMAX_BYTES
            continue
        is_plain = tensor.dtype in _WIDE_FLOATS and "scale" not in tensor.name
        total += tensor.elements * model.dtype_bytes if is_plain else tensor.size_bytes
    return total


def _loads_all(names: Iterable[str], model: ModelSpec) -> bool:
    """Return whether vLLM loads all tensors of these names, and as they are stored.

    Then the sum of their bytes is what it loads. The files of a model in 32 bit are twice what is loaded.
    """
    return not (model.stored_wide or model.dtype_asked or any(_is_skipped(name, model) for name in names))


def _is_skipped(name: str, model: ModelSpec) -> bool:
    layer = _LAYER.search(name)
    if layer and int(layer[1]) >= model.num_hidden_layers and not any(part in name for part in _OF_TOWERS):
        return True
    if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
        return True
    return model.head is None and name.endswith(("lm_head.weight", "proj_out.weight"))
