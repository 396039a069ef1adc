"""Makes tiny models with random weights and the architecture of the large ones, for demos and tests.

Only the sizes differ from Llama 3.1: grouped-query attention, scaled rotary embedding, untied embeddings and the chat
format are kept, so that the engine runs the same code and the layouts of the large models divide. Answers are
gibberish, in English words. `demo_model.json` holds the files of a model as far as they are always the same. Needs the
standard library alone; how an engine serves the model is left to it.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import ARGS_FILE

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_CONFIG, _TOKENIZER = _DATA["config.json"], _DATA["tokenizer.json"]
_WORDS = " ".join(_DATA["words"]).split()
VOCAB_SIZE: int = _CONFIG["vocab_size"]


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model; head_dim is the smallest that the engine's CPU attention takes."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32


# The layout of each large model divides its likeness: TP=8 x PP=2, TP=4, one GPU.
SHAPES = {
    "405b": TinyShape(4, 256, 512, num_attention_heads=16, num_key_value_heads=8),
    "70b": TinyShape(4, 128, 256, num_attention_heads=8, num_key_value_heads=4),
    "8b": TinyShape(2, 128, 256, num_attention_heads=4, num_key_value_heads=2),
}
# A small engine starts quickly on a CPU with a small cache (bytes per GPU) and nothing compiled.
ENGINE_ARGS = """\
# Appended to the engine's command line when this folder stands in for a model (HPC_SERVE_MODEL).
--dtype bfloat16
--max-model-len 2048
--max-num-seqs 8
--kv-cache-memory-bytes 16777216
--enforce-eager
"""


def make_demo_model(folder: Path, *, like: str = "8b", seed: int = 0, **sizes: int) -> Path:
    """Write a model like `405b`, `70b` or `8b` into a new folder, under a megabyte or a few, and return the folder.

    `sizes` replace fields of its TinyShape; the same `seed` and sizes give the same bytes. Raises InvalidRequestError
    for a likeness there is none of, and FileExistsError where the folder holds something else.
    """
    if like not in SHAPES:
        raise InvalidRequestError(f"no tiny model is like {like!r}; there are: {', '.join(SHAPES)}")
    shape = TinyShape(**{**vars(SHAPES[like]), **sizes})
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / ARGS_FILE).exists():
        raise FileExistsError(f"{folder} holds something that is not a tiny model; choose another folder")
    (folder / ARGS_FILE).write_text(ENGINE_ARGS)
    vocabulary, merges = _vocabulary()
    _write_json(folder / "config.json", _CONFIG | vars(shape))
    _write_json(
        folder / "tokenizer.json", _TOKENIZER | {"model": _TOKENIZER["model"] | {"vocab": vocabulary, "merges": merges}}
    )
    for name in ("generation_config.json", "tokenizer_config.json"):
        _write_json(folder / name, _DATA[name])
    _write_weights(folder / "model.safetensors", shape, _speakable(vocabulary), seed)
    return folder


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# The tokenizer: byte-level BPE, special tokens first


def _byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each byte, as GPT-2 defined it."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in shown else next(substitutes)) for byte in range(256)]


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Return the tokens by number, and the merges that make the longer ones: beginnings of common words, after a
    space."""
    letters = _byte_letters()
    tokens = dict.fromkeys([*(token["content"] for token in _TOKENIZER["added_tokens"]), *letters])
    merges = []
    for word in _WORDS:
        spaced = letters[ord(" ")] + word
        for end in range(2, len(spaced) + 1):
            if spaced[:end] not in tokens and len(tokens) < VOCAB_SIZE:
                tokens[spaced[:end]] = None
                merges.append([spaced[: end - 1], spaced[end - 1]])
    assert len(tokens) == VOCAB_SIZE, f"the words give {len(tokens)} tokens, not {VOCAB_SIZE}"
    return {token: number for number, token in enumerate(tokens)}, merges


def _speakable(vocabulary: dict[str, int]) -> frozenset[int]:
    """Return the tokens that the model may say: whole words, and the end of its turn."""
    space = _byte_letters()[ord(" ")]
    words = {vocabulary[space + word] for word in _WORDS if space + word in vocabulary}
    return frozenset({*words, _CONFIG["eos_token_id"]})


# The weights, as bfloat16 in one safetensors file (its format: 8 bytes of header length, JSON, then the tensors)


def _tensors(shape: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden)
    for layer in range(shape.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.self_attn.q_proj.weight", (query, hidden)
        yield f"{name}.self_attn.k_proj.weight", (key, hidden)
        yield f"{name}.self_attn.v_proj.weight", (key, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, query)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        yield f"{name}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{name}.mlp.up_proj.weight", (inner, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, hidden)


def _write_weights(path: Path, shape: TinyShape, speakable: frozenset[int], seed: int) -> None:
    source = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = bytearray()
    for name, dimensions in _tensors(shape):
        if len(dimensions) == 1:
            data = _bfloat16(1.0) * dimensions[0]
        else:
            # Louder scores at the end leave sampling little chance to pick a silenced token; its score is zero.
            loudness = 8.0 if name == "lm_head.weight" else 1.0
            data = _random_bfloat16(source, math.prod(dimensions), scale=loudness * dimensions[-1] ** -0.5)
        if name == "lm_head.weight":
            data = _silence(data, dimensions, speakable)
        begin, content = len(content), content + data
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def _bfloat16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def _random_bfloat16(source: random.Random, count: int, *, scale: float) -> bytes:
    """Return numbers of random sign between 1 and 2 times the power of two next below `scale`.

    They are random bits, without arithmetic.
    """
    low, high = _bfloat16(2.0 ** math.floor(math.log2(scale)))
    data = bytearray(source.randbytes(2 * count))
    data[0::2] = bytes(data[0::2]).translate(bytes(byte & 0x7F | low for byte in range(256)))
    data[1::2] = bytes(data[1::2]).translate(bytes(byte & 0x80 | high for byte in range(256)))
    return bytes(data)


def _silence(data: bytes, dimensions: tuple[int, ...], speakable: frozenset[int]) -> bytes:
    """Set the rows of tokens that must not be said to zero. Another token's score is always above theirs."""
    row = 2 * dimensions[1]
    rows = [data[number * row : (number + 1) * row] for number in range(dimensions[0])]
    return b"".join(kept if number in speakable else bytes(row) for number, kept in enumerate(rows))
