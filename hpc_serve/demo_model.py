"""Makes tiny models with random weights and the architecture of the large ones, for demos and tests.

Only the sizes differ from Llama 3.1: grouped-query attention, scaled rotary embedding, untied embeddings and the chat
format are kept, so that the engine runs the same code and the layouts of the large models divide. Answers are
gibberish, in English words. Needs the standard library alone; how an engine serves the model is left to it.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import InvalidRequestError
from hpc_serve.vllm.arguments import ARGS_FILE

VOCAB_SIZE = 512
MAX_POSITIONS = 131_072
SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"
    " what all were we when your can said there use an each which she do how their if will up other about out many then"
    " them these so some her would make like him into time has look two more write go see number no way could people"
    " my than first water been call who oil its now find long down day did get come made may part over new sound take"
    " only little work know place year live back give most very after thing our just name good sentence man think"
)


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
    _write_json(folder / "config.json", _config(shape))
    generation = {"do_sample": True, "temperature": 0.8, "eos_token_id": _token_ids("<|eot_id|>")}
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer.json", _tokenizer(vocabulary, merges))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_weights(folder / "model.safetensors", shape, _speakable(vocabulary), seed)
    return folder


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(shape: TinyShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(shape),
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": _token_ids("<|begin_of_text|>")[0],
        "eos_token_id": _token_ids("<|eot_id|>")[0],
    }


# The tokenizer: byte-level BPE, special tokens first


def _token_ids(*names: str) -> list[int]:
    return [SPECIAL_TOKENS.index(name) for name in names]


def _byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE writes for each byte, as GPT-2 defined it."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in shown else next(substitutes)) for byte in range(256)]


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Return the tokens by number, and the merges that make the longer ones: beginnings of common words, after a
    space."""
    letters = _byte_letters()
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *letters])
    merges = []
    for word in WORDS.split():
        spaced = letters[ord(" ")] + word
        for end in range(2, len(spaced) + 1):
            if spaced[:end] not in tokens and len(tokens) < VOCAB_SIZE:
                tokens[spaced[:end]] = None
                merges.append([spaced[: end - 1], spaced[end - 1]])
    assert len(tokens) == VOCAB_SIZE, f"WORDS gives {len(tokens)} tokens, not {VOCAB_SIZE}"
    return {token: number for number, token in enumerate(tokens)}, merges


def _speakable(vocabulary: dict[str, int]) -> frozenset[int]:
    """Return the tokens that the model may say: whole words, and the end of its turn."""
    space = _byte_letters()[ord(" ")]
    words = {vocabulary[space + word] for word in WORDS.split() if space + word in vocabulary}
    return frozenset(words | set(_token_ids("<|eot_id|>")))


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe: dict[str, object] = {"type": "BPE", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **plain} for number, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": bpe | {"vocab": vocabulary, "merges": merges},
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


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
