"""Vision towers of the multimodal models the planner knows, as far as weights go.

Each pipeline stage holds the tower; tensor parallelism divides it as it does the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_serve.plan.reader import block
from hpc_serve.plan.weights import Block, Linear, Part, Vector, Weight


def _linear(name: str, inputs: int, outputs: list[int], split: Any = "none", *, bias: bool = False) -> Linear:
    return Linear(
        name=name, inputs=Part(inputs), outputs=tuple(Part(size) for size in outputs), split=split, bias=bias
    )


def _vector(name: str, size: int) -> Vector:
    return Vector(name=name, size=size)


def siglip(config: Mapping[str, Any], hidden_size: int) -> Block:
    """SigLIP and Gemma 3's projector."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_tower.encoder.layers.{index}"
        layers += [
            _linear(f"{name}.self_attn.q_proj", width, [width, width, width], "column", bias=True),
            _linear(f"{name}.self_attn.out_proj", width, [width], "row", bias=True),
            _linear(f"{name}.mlp.fc1", width, [inner], "column", bias=True),
            _linear(f"{name}.mlp.fc2", inner, [width], "row", bias=True),
            _vector(f"{name}.layer_norms", 4 * width),
        ]
    ends: list[Weight] = [
        _linear("vision_tower.patch_embedding", 3 * config["patch_size"] ** 2, [width], bias=True),
        _vector("vision_tower.position_embedding", patches * width),
        _vector("vision_tower.post_layernorm", 2 * width),
        _vector("multi_modal_projector.mm_input_projection_weight", width * hidden_size),
        _vector("multi_modal_projector.mm_soft_emb_norm", width),
    ]
    return block(layers, ends)


def pixtral(config: Mapping[str, Any], hidden_size: int, merge: int = 2) -> Block:
    """Pixtral's encoder, its patch merger, and the projector of Mistral 3."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_tower.transformer.layers.{index}"
        layers += [
            _linear(f"{name}.attention.q_proj", width, [width, width, width], "column"),
            _linear(f"{name}.attention.o_proj", width, [width], "row"),
            _linear(f"{name}.feed_forward.gate_proj", width, [inner, inner], "column"),
            _linear(f"{name}.feed_forward.down_proj", inner, [width], "row"),
            _vector(f"{name}.norms", 2 * width),
        ]
    ends: list[Weight] = [
        _linear("vision_tower.patch_conv", 3 * config["patch_size"] ** 2, [width]),
        _vector("vision_tower.ln_pre", width),
        _vector("multi_modal_projector.norm", width),
        _linear("multi_modal_projector.patch_merger", width * merge**2, [width]),
        _linear("multi_modal_projector.linear_1", width, [hidden_size], "column"),
        _linear("multi_modal_projector.linear_2", hidden_size, [hidden_size], "row"),
    ]
    return block(layers, ends)


def llama4_vision(config: Mapping[str, Any], hidden_size: int) -> Block:
    """Llama 4's tower, its pixel-shuffle adapter and projector."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    output = config["vision_output_dim"]
    patches = (config["image_size"] // config["patch_size"]) ** 2 + 1
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_model.model.layers.{index}"
        layers += [
            _linear(f"{name}.self_attn.q_proj", width, [width, width, width], "column", bias=True),
            _linear(f"{name}.self_attn.o_proj", width, [width], "row", bias=True),
            _linear(f"{name}.mlp.fc1", width, [inner], "column", bias=True),
            _linear(f"{name}.mlp.fc2", inner, [width], "row", bias=True),
            _vector(f"{name}.norms", 4 * width),
        ]
    ends: list[Weight] = [
        _linear("vision_model.patch_embedding", 3 * config["patch_size"] ** 2, [width], "column"),
        _vector("vision_model.class_embedding", width),
        _vector("vision_model.positional_embedding_vlm", patches * width),
        _vector("vision_model.layernorms", 4 * width),
        _linear("vision_model.vision_adapter.fc1", inner, [output], "column"),
        _linear("vision_model.vision_adapter.fc2", output, [output], "row"),
        _linear("multi_modal_projector.linear_1", output, [hidden_size]),
    ]
    return block(layers, ends)
