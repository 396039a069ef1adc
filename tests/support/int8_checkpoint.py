"""Makes an int8 checkpoint of a tiny one, as llm-compressor writes them (w8a8: int8 weights with a scale for each row).

    python -m tests.support.int8_checkpoint SOURCE TARGET

vLLM quantises no dense layer to int8 as it loads it, so int8 engines need such a checkpoint. Needs torch, safetensors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.arguments import given_words

CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantise(source: Path, target: Path) -> Path:
    """Write `target`, an int8 copy of the checkpoint in `source` (one file of safetensors); returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        tensors[name] = torch.round(weight.float() / scale).to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(weight.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return target


if __name__ == "__main__":
    quantise(*map(Path, given_words(__doc__, 2)))
