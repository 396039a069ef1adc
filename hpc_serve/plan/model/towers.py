"""More vision towers: those of GLM-4.5V, Kimi-K2.5 and K3, MiniMax-M3, Step-3.7, LFM2-VL, Muse Glimmer, Gemma 4,
InternVL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_serve.plan.model.layers import block
from hpc_serve.plan.model.spec import ImageEncoder
from hpc_serve.plan.model.vision import encoder_layers, linear, rotating_encoder, vector
from hpc_serve.plan.model.weights import Block, Weight

_GLM_IMAGE_TOKENS = 6144
_MOON_IMAGE_TOKENS = 4096
"""The largest inputs that the models' own preprocessors make: GLM's 9,633,792 pixels over two frames, Kimi's 16,384
patches of which four are merged."""


def glm4v(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of GLM-4.1V to 4.6V: the MLPs of its layers are as wide as the decoder, its merger's as said."""
    width, inner, output = config["hidden_size"], config["intermediate_size"], config["out_hidden_size"]
    merge, bias = config.get("spatial_merge_size", 2), bool(config.get("attention_bias", False))
    pixels = config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * config["patch_size"] ** 2
    layers: list[Weight] = []
    for index in range(config["depth"]):
        name = f"visual.blocks.{index}"
        layers += [
            linear(f"{name}.attn.qkv", width, [width, width, width], "column", bias=bias),
            linear(f"{name}.attn.proj", width, [width], "row"),
            linear(f"{name}.mlp.gate_proj", width, [output, output], "column"),
            linear(f"{name}.mlp.down_proj", output, [width], "row"),
            vector(f"{name}.norms", 2 * width),
        ]
    ends: list[Weight] = [
        linear("visual.patch_embed", pixels, [width], bias=True),
        vector("visual.embeddings", (config["image_size"] // config["patch_size"]) ** 2 * width),
        vector("visual.post_norms", 2 * width),
        linear("visual.downsample", width * merge**2, [output], bias=True),
        linear("visual.merger.proj", output, [output], "column"),
        vector("visual.merger.post_projection_norm", 2 * output),
        linear("visual.merger.gate_proj", output, [inner, inner], "column"),
        linear("visual.merger.down_proj", inner, [output], "row"),
    ]
    return block(layers, ends), rotating_encoder(width, _GLM_IMAGE_TOKENS, merge)


def moon_vit(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return Kimi's MoonViT-3D with the projector that merges patches. K3's has wider attention, and no biases."""
    width = config.get("vt_hidden_size", config.get("hidden_size", 1152))
    inner = config.get("vt_intermediate_size", config.get("intermediate_size", 4304))
    count = config.get("vt_num_hidden_layers", config.get("num_hidden_layers", 27))
    rows = config.get("init_pos_emb_height", config.get("pos_emb_height", 64))
    columns = config.get("init_pos_emb_width", config.get("pos_emb_width", 64))
    attention = config.get("qkv_hidden_size", width)
    bias, mlp_bias = bool(config.get("attn_bias", True)), bool(config.get("linear_bias", True))
    norm = width if config.get("norm_type", "layernorm") == "rmsnorm" else 2 * width
    high, wide = config.get("merge_kernel_size", (2, 2))
    merged = width * high * wide
    layers: list[Weight] = []
    for index in range(count):
        name = f"vision_tower.encoder.blocks.{index}"
        layers += [
            linear(f"{name}.wqkv", width, [attention] * 3, "column", bias=bias),
            linear(f"{name}.wo", attention, [width], "row", bias=bias),
            linear(f"{name}.mlp.fc0", width, [inner], "column", bias=mlp_bias),
            linear(f"{name}.mlp.fc1", inner, [width], "row", bias=mlp_bias),
            vector(f"{name}.norms", 2 * norm),
        ]
    is_second = config.get("mm_projector_type", "patchmerger") == "patchmergerv2"
    patch_bias = bool(config.get("patch_embed_proj_bias", True))
    ends: list[Weight] = [
        linear("vision_tower.patch_embed.proj", 3 * config.get("patch_size", 14) ** 2, [width], bias=patch_bias),
        vector("vision_tower.patch_embed.pos_emb", rows * columns * width),
        vector("vision_tower.final_layernorm", norm),
        vector("mm_projector.norm", hidden_size if is_second else 2 * width),
        linear("mm_projector.linear_1", merged, [merged], bias=not is_second),
        linear("mm_projector.linear_2", merged, [hidden_size], bias=not is_second),
    ]
    return block(layers, ends), rotating_encoder(width, _MOON_IMAGE_TOKENS, high)


def minimax(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return MiniMax-M3's tower, its projector, and the one after it that merges patches."""
    width, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config["multimodal_projector_bias"])
    compression = config.get("img_token_compression_config") or {}
    merge, frames = compression.get("spatial_merge_size", 2), compression.get("temporal_patch_size", 2)
    between, merged = config.get("projector_hidden_size") or hidden_size, hidden_size * merge**2
    names = ("self_attn.qkv_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2", "layer_norms")
    layers = encoder_layers("vision_tower.encoder.layers", config["num_hidden_layers"], names, width, inner)
    pixels = config.get("num_channels", 3) * frames * config["patch_size"] ** 2
    ends: list[Weight] = [
        linear("vision_tower.patch_embedding", pixels, [width]),
        vector("vision_tower.pre_layrnorm", 2 * width),
        linear("multi_modal_projector.linear_1", width, [between], "column", bias=bias),
        linear("multi_modal_projector.linear_2", between, [hidden_size], "row", bias=bias),
        linear("patch_merge_mlp.linear_1", merged, [between], "column", bias=bias),
        linear("patch_merge_mlp.linear_2", between, [hidden_size], "row", bias=bias),
    ]
    tokens = (config["image_size"] // config["patch_size"] // merge) ** 2
    return block(layers, ends), rotating_encoder(width, tokens, merge)


def step3p7(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return Step-3.7's perception encoder and the convolutions after it.

    Its fields have its own names or transformers'.
    """
    width = config.get("width", config.get("hidden_size", 1536))
    count = config.get("layers", config.get("num_hidden_layers", 47))
    inner = config.get("intermediate_size", int(width * config.get("mlp_ratio", 8960 / 1536)))
    patch, image = config.get("patch_size", 14), config.get("image_size", 728)
    has_class = bool(config.get("use_cls_token", False))
    names = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2", "layer_norms")
    layers = encoder_layers("vision_model.transformer.resblocks", count, names, width, inner)
    scales = 2 * width * count if config.get("ls_init_value", config.get("layer_scale_init_value", 0.1)) else 0
    norms = 2 * width * (bool(config.get("use_ln_pre", True)) + bool(config.get("use_ln_post", False)))
    positions = (image // patch) ** 2 + has_class if config.get("use_abs_posemb", True) else 0
    ends: list[Weight] = [
        linear("vision_model.conv1", config.get("num_channels", 3) * patch**2, [width]),
        vector("vision_model.norms_and_scales", norms + scales),
        vector("vision_model.positional_embedding", (positions + has_class) * width),
        linear("vision_model.vit_downsampler1", 9 * width, [2 * width], bias=True),
        linear("vision_model.vit_downsampler2", 18 * width, [4 * width], bias=True),
        linear("vit_large_projector", 4 * width, [hidden_size], bias=bool(config["projector_bias"])),
    ]
    return block(layers, ends), rotating_encoder(width, (image // patch // 4) ** 2, 4)


def lfm2_siglip(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return SigLIP 2 without its head, and the projector of LFM2-VL."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    factor, between = config["downsample_factor"], config["projector_hidden_size"]
    bias, patch = bool(config["projector_bias"]), config.get("patch_size", 16)
    names = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2", "layer_norms")
    layers = encoder_layers("vision_tower.encoder.layers", config["num_hidden_layers"], names, width, inner)
    merged = width * factor**2
    ends: list[Weight] = [
        linear("vision_tower.patch_embedding", config.get("num_channels", 3) * patch**2, [width], bias=True),
        vector("vision_tower.position_embedding", config.get("num_patches", 256) * width),
        vector("vision_tower.post_layernorm", 2 * width),
        linear("multi_modal_projector.linear_1", merged, [between], bias=bias),
        linear("multi_modal_projector.linear_2", between, [hidden_size], bias=bias),
    ]
    if config["projector_use_layernorm"]:
        ends.append(vector("multi_modal_projector.layer_norm", 2 * merged))
    images = ImageEncoder(
        image_tokens=(config["max_tiles"] + 1) * (config["tile_size"] // (patch * factor)) ** 2,
        patches_per_token=factor**2,
        patch_elements=2 * width,
        split_patch_elements=2 * inner,
    )
    return block(layers, ends), images


def muse(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return the tower of Muse Glimmer, the adapter that merges patches, and the projection."""
    width, inner, merge = config["hidden_size"], config["intermediate_size"], config.get("merge_size", 2)
    merged, between = config["out_hidden_size"], config["projector_hidden_size"]
    pixels = 3 * config.get("patch_temporal", 2) * config["patch_size"] ** 2
    names = ("attn.q_proj", "attn.proj", "mlp.fc1", "mlp.fc2", "norms")
    layers = encoder_layers("vision_tower.layers", config["num_hidden_layers"], names, width, inner)
    ends: list[Weight] = [
        linear("vision_tower.patch_embedding", pixels, [width]),
        vector("vision_tower.position_embedding", config["pos_emb_height"] * config["pos_emb_width"] * width),
        vector("vision_tower.ln_pre_and_post", 4 * width),
        linear("vision_adapter.fc1", merged, [between]),
        linear("vision_adapter.fc2", between, [between]),
        linear("vision_projection", between, [hidden_size]),
    ]
    tokens = config["pos_emb_height"] * config["pos_emb_width"] // merge**2
    return block(layers, ends), rotating_encoder(width, tokens, merge)


def gemma4(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return Gemma 4's tower, which no rank divides (vLLM takes transformers' own), and the projection of its
    outputs."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, head_dim = config["num_attention_heads"], config.get("head_dim", 64)
    kv_heads, bias = config.get("num_key_value_heads", heads), bool(config.get("attention_bias", False))
    query, kv = heads * head_dim, kv_heads * head_dim
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_tower.encoder.layers.{index}"
        layers += [
            linear(f"{name}.self_attn.q_proj", width, [query, kv, kv], bias=bias),
            linear(f"{name}.self_attn.o_proj", query, [width], bias=bias),
            linear(f"{name}.mlp.gate_proj", width, [inner, inner]),
            linear(f"{name}.mlp.down_proj", inner, [width]),
            vector(f"{name}.norms", 4 * width + 2 * head_dim),
        ]
    ends: list[Weight] = [
        linear("vision_tower.patch_embedder.input_proj", 3 * config.get("patch_size", 16) ** 2, [width]),
        vector(
            "vision_tower.patch_embedder.position_embedding_table",
            2 * config.get("position_embedding_size", 10_240) * width,
        ),
        linear("embed_vision.embedding_projection", width, [hidden_size]),
    ]
    images = ImageEncoder(
        image_tokens=config["vision_soft_tokens_per_image"],
        patches_per_token=config.get("pooling_kernel_size", 3) ** 2,
        patch_elements=2 * width + 2 * inner,
        split_patch_elements=0,
    )
    return block(layers, ends), images


def intern_vit(config: Mapping[str, Any], hidden_size: int) -> tuple[Block, ImageEncoder]:
    """Return InternVL's tower with scaled residuals, and the projector that merges four patches into one."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    patches = (config["image_size"] // config["patch_size"]) ** 2
    merge = round(1 / config["downsample_ratio"])
    norm = width if config.get("norm_type", "rms_norm") == "rms_norm" else 2 * width
    layers: list[Weight] = []
    for index in range(config["num_hidden_layers"]):
        name = f"vision_model.encoder.layers.{index}"
        layers += [
            linear(f"{name}.attn.qkv", width, [width] * 3, "column", bias=bool(config.get("qkv_bias", False))),
            linear(f"{name}.attn.proj", width, [width], "row", bias=True),
            linear(f"{name}.mlp.fc1", width, [inner], "column", bias=True),
            linear(f"{name}.mlp.fc2", inner, [width], "row", bias=True),
            vector(f"{name}.norms", 2 * norm + 2 * width),
        ]
    merged = width * merge**2
    ends: list[Weight] = [
        linear(
            "vision_model.patch_embedding",
            config.get("num_channels", 3) * config["patch_size"] ** 2,
            [width],
            bias=True,
        ),
        vector("vision_model.embeddings", (patches + 2) * width),
        vector("mlp1.0", 2 * merged),
        linear("mlp1.1", merged, [hidden_size], bias=True),
        linear("mlp1.3", hidden_size, [hidden_size], bias=True),
    ]
    tiles = config["max_dynamic_patch"] + bool(config["use_thumbnail"])
    images = ImageEncoder(
        image_tokens=tiles * patches // merge**2,
        patches_per_token=merge**2,
        patch_elements=2 * width,
        split_patch_elements=2 * inner,
    )
    return block(layers, ends), images
