"""Makes LoRA adapters, as PEFT saves them, for the tiny models of `hpc_serve.demo_model`. Standard library alone."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import SHAPES


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], *, seed: int = 0, size: float = 1.0) -> None:
    """Write float32 tensors of these shapes, with random values of about `size`."""
    rng, data, header = random.Random(seed), b"", {}
    for name, shape in tensors.items():
        count = shape[0] * shape[1]
        values = struct.pack(f"<{count}f", *(rng.gauss(0.0, size) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def make_adapter(
    folder: Path,
    *,
    like: str = "8b",
    rank: int = 8,
    seed: int = 0,
    hidden: int = 0,
    layers: int = 0,
    module: str = "self_attn.q_proj",
    **config: Any,
) -> Path:
    """Write an adapter of one module of each layer, so strong that a greedy answer differs from the model's own."""
    shape = SHAPES[like]
    hidden = hidden or shape.hidden_size
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(layers or shape.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = (rank, hidden)
        tensors[f"{name}.lora_B.weight"] = (hidden, rank)
    folder.mkdir(parents=True)
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps({**base, **config}))
    write_safetensors(folder / "adapter_model.safetensors", tensors, seed=seed)
    return folder
