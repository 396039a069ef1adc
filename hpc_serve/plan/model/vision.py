"""Vision towers of multimodal models: their weights, and what images need while vLLM profiles memory.

Each pipeline stage holds the tower. Tensor parallelism divides it as it divides the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.plan.model.layers import block
from hpc_serve.plan.model.spec import ImageEncoder
from hpc_serve.plan.model.weights import Block, Linear, Part, Vector, Weight

_PIXTRAL_IMAGE_SIZE = 1540
_LLAMA4_TILES = 17
_QWEN_IMAGE_TOKENS = 16384
_QWEN2_FRAME_PAIRS = 7
_QWEN3_KEPT_TOKENS_0_11 = 153_600 + 12_288
"""The largest inputs that the models' own preprocessors make: Mistral's longest edge in pixels, Llama 4's 16 tiles and
overview, Qwen's 16,777,216 pixels (vLLM prints "Encoder cache will be initialized with a budget of 16384 tokens"),
Qwen2.5-VL's videos of 14 frames ("114688 tokens"). vLLM 0.11 kept Qwen3-VL's video of 12,288 tokens beside a copy of
12.5 times as many."""


def rotating_encoder(width: int, tokens: int, merge: int, *, output_rows: int = 1) -> ImageEncoder:
    """Return the memory needs of a tower with rotary embeddings.

    Every rank holds residual and normed input, and its share of q, k and v (3 widths) and of q and k rotated in 32 bit
    (10 widths of 16 bit). MiMo-VL-7B on H100: 2.49 GiB measured, 2.47 by this.
    """
    return ImageEncoder(
        image_tokens=tokens,
        patches_per_token=merge**2,
        patch_elements=2 * width,
        split_patch_elements=13 * width,
        output_rows=output_rows,
    )


def linear(name: str, inputs: int, outputs: list[int], split: Any = "none", *, bias: bool = False) -> Linear:
    return Linear(name=name, inputs=Part(inputs), outputs=tuple(Part(size) for size in outputs), split=split, bias=bias)


def vector(name: str, size: int) -> Vector:
    return Vector(name=name, size=size)


def encoder_layers(prefix: str, count: int, names: Sequence[str], width: int, inner: int) -> list[Weight]:
    """Layers of a plain transformer with biases: attention in and out, MLP up and down, two norms, by these names."""
    qkv, out, up, down, norms = names
    layers: list[Weight] = []
    for index in range(count):
        name = f"{prefix}.{index}"
        layers += [
            linear(f"{name}.{qkv}", width, [width, width, width], "column", bias=True),
            linear(f"{name}.{out}", width, [width], "row", bias=True),
            linear(f"{name}.{up}", width, [inner], "column", bias=True),
            linear(f"{name}.{down}", inner, [width], "row", bias=True),
            vector(f"{name}.{norms}", 4 * width),
        ]
    return layers


def siglip(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return SigLIP and Gemma 3's projector."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    names = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2", "layer_norms")
    layers = encoder_layers("vision_tower.encoder.layers", config["num_hidden_layers"], names, width, inner)
    ends: list[Weight] = [
        linear(
            "vision_tower.patch_embedding",
            config.get("num_channels", 3) * config["patch_size"] ** 2,
            [width],
            bias=True,
        ),
        vector("vision_tower.position_embedding", patches * width),
        vector("vision_tower.post_layernorm", 2 * width),
        vector("multi_modal_projector.mm_input_projection_weight", width * hidden_size),
        vector("multi_modal_projector.mm_soft_emb_norm", width),
    ]
    if config.get("vision_use_head", True):
        ends += [
            vector("vision_tower.head.probe", width),
            linear("vision_tower.head.attention.in_proj", width, [width, width, width], bias=True),
            linear("vision_tower.head.attention.out_proj", width, [width], bias=True),
            vector("vision_tower.head.layernorm", 2 * width),
            linear("vision_tower.head.mlp.fc1", width, [inner], "column", bias=True),
            linear("vision_tower.head.mlp.fc2", inner, [width], "row", bias=True),
        ]
    tokens = config["mm_tokens_per_image"]
    images = ImageEncoder(
        image_tokens=tokens,
        patches_per_token=patches // tokens,
        patch_elements=2 * width,
        split_patch_elements=2 * inner,
    )
    return block(layers, ends), images


def pixtral(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return Pixtral's encoder, its patch merger, and the projector of Mistral 3."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    merge = config["spatial_merge_size"]
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_tower.transformer.layers.{index}"
        layers += [
            linear(f"{name}.attention.q_proj", width, [width, width, width], "column"),
            linear(f"{name}.attention.o_proj", width, [width], "row"),
            linear(f"{name}.feed_forward.gate_proj", width, [inner, inner], "column"),
            linear(f"{name}.feed_forward.down_proj", inner, [width], "row"),
            vector(f"{name}.norms", 2 * width),
        ]
    ends: list[Weight] = [
        linear("vision_tower.patch_conv", config.get("num_channels", 3) * config["patch_size"] ** 2, [width]),
        vector("vision_tower.ln_pre", width),
        vector("multi_modal_projector.norm", width),
        linear("multi_modal_projector.patch_merger", width * merge**2, [width]),
        linear("multi_modal_projector.linear_1", width, [hidden_size], "column"),
        linear("multi_modal_projector.linear_2", hidden_size, [hidden_size], "row"),
    ]
    side = config.get("image_size", _PIXTRAL_IMAGE_SIZE) // (config["patch_size"] * merge)
    return block(layers, ends), rotating_encoder(width, side * (side + 1), merge)


def qwen2_vision(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of Qwen2-VL, whose `hidden_size` is the decoder's."""
    width, merge = config.get("embed_dim", 1280), config.get("spatial_merge_size", 2)
    inner, merged = int(width * config.get("mlp_ratio", 4)), width * merge**2
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norms")
    layers = encoder_layers("visual.blocks", config.get("depth", 32), names, width, inner)
    pixels = config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * config.get("patch_size", 14) ** 2
    ends: list[Weight] = [
        linear("visual.patch_embed", pixels, [width]),
        vector("visual.merger.ln_q", 2 * width),
        linear("visual.merger.mlp.0", merged, [merged], "column", bias=True),
        linear("visual.merger.mlp.2", merged, [config.get("hidden_size", hidden_size)], "row", bias=True),
    ]
    images = rotating_encoder(width, _QWEN_IMAGE_TOKENS, merge)
    return block(layers, ends), replace(images, frame_pairs=_QWEN2_FRAME_PAIRS)


def qwen2_5_vision(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of Qwen2.5-VL: a gated MLP, norms without bias."""
    width, inner, merge = config["hidden_size"], config["intermediate_size"], config.get("spatial_merge_size", 2)
    merged = width * merge**2
    layers: list[Weight] = []
    for index in range(config.get("depth", 32)):
        name = f"visual.blocks.{index}"
        layers += [
            linear(f"{name}.attn.qkv", width, [width, width, width], "column", bias=True),
            linear(f"{name}.attn.proj", width, [width], "row", bias=True),
            linear(f"{name}.mlp.gate_proj", width, [inner, inner], "column", bias=True),
            linear(f"{name}.mlp.down_proj", inner, [width], "row", bias=True),
            vector(f"{name}.norms", 2 * width),
        ]
    pixels = config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * config.get("patch_size", 14) ** 2
    ends: list[Weight] = [
        linear("visual.patch_embed", pixels, [width]),
        vector("visual.merger.ln_q", width),
        linear("visual.merger.mlp.0", merged, [merged], "column", bias=True),
        linear("visual.merger.mlp.2", merged, [config["out_hidden_size"]], "row", bias=True),
    ]
    images = rotating_encoder(width, _QWEN_IMAGE_TOKENS, merge)
    return block(layers, ends), replace(images, frame_pairs=_QWEN2_FRAME_PAIRS)


def qwen3_vision(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of Qwen3-VL and Qwen 3.5: a merger at the end, and one after each layer that feeds the
    decoder."""
    width, inner, output = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    merge, fed = config["spatial_merge_size"], config.get("deepstack_visual_indexes", ())
    merged = width * merge**2
    names = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2", "norms")
    layers = encoder_layers("visual.blocks", config["depth"], names, width, inner)
    pixels = config.get("in_channels", 3) * config["temporal_patch_size"] * config["patch_size"] ** 2
    ends: list[Weight] = [
        linear("visual.patch_embed", pixels, [width], bias=True),
        vector("visual.pos_embed", config["num_position_embeddings"] * width),
    ]
    for norm in (width, *(merged for _ in fed)):
        ends += [
            vector("visual.merger.norm", 2 * norm),
            linear("visual.merger.linear_fc1", merged, [merged], "column", bias=True),
            linear("visual.merger.linear_fc2", merged, [output], "row", bias=True),
        ]
    images = rotating_encoder(width, _QWEN_IMAGE_TOKENS, merge, output_rows=1 + len(fed))
    return block(layers, ends), replace(images, kept_tokens_0_11=_QWEN3_KEPT_TOKENS_0_11 if fed else 0)


def llama4_vision(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of Llama 4, its pixel-shuffle adapter and its projector."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    output = config["vision_output_dim"]
    between, adapted = config.get("projector_input_dim", output), config.get("projector_output_dim", output)
    patches = (config["image_size"] // config["patch_size"]) ** 2 + 1
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2", "norms")
    layers = encoder_layers("vision_model.model.layers", config["num_hidden_layers"], names, width, inner)
    ends: list[Weight] = [
        linear(
            "vision_model.patch_embedding", config.get("num_channels", 3) * config["patch_size"] ** 2, [width], "column"
        ),
        vector("vision_model.class_embedding", width),
        vector("vision_model.positional_embedding_vlm", patches * width),
        vector("vision_model.layernorms", 4 * width),
        linear("vision_model.vision_adapter.fc1", inner, [between], "column"),
        linear("vision_model.vision_adapter.fc2", between, [adapted], "row"),
        linear("multi_modal_projector.linear_1", output, [hidden_size]),
    ]
    tokens = int(_LLAMA4_TILES * patches * config.get("pixel_shuffle_ratio", 0.5) ** 2)
    return block(layers, ends), rotating_encoder(width, tokens, 2)
