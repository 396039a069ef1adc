"""Which function describes a layer of each architecture, and what else vLLM does for one architecture alone.

The functions are in dense.py, moe.py, latent.py, compressed.py, mixed.py, gemma4.py, hybrid.py and kimi.py, those of
image encoders in vision.py and towers.py. Here they are named, as "file.function": a plan loads the files of its model
alone. architectures.py builds models by these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def function_named(name: str) -> Callable[..., Any]:
    """The function that a table names.

    >>> function_named("dense.llama").__name__
    'llama'
    """
    file, function = name.split(".")
    found: Callable[..., Any] = getattr(import_module(f"hpc_serve.plan.model.{file}"), function)
    return found


FAMILIES: dict[str, str] = {
    "AfmoeForCausalLM": "mixed.afmoe",
    "ApertusForCausalLM": "dense.apertus",
    "DeciLMForCausalLM": "dense.nemotron_nas",
    "DeepseekForCausalLM": "moe.deepseek_v1",
    "DeepseekV2ForCausalLM": "latent.deepseek",
    "DeepseekV32ForCausalLM": "latent.deepseek_sparse",
    "DeepseekV3ForCausalLM": "latent.deepseek",
    "DeepseekV4ForCausalLM": "compressed.deepseek_v4",
    "Ernie4_5_MoeForCausalLM": "mixed.ernie4_5_moe",
    "Exaone4ForCausalLM": "dense.exaone4",
    "FalconForCausalLM": "dense.falcon",
    "Gemma2ForCausalLM": "dense.gemma2",
    "Gemma3ForCausalLM": "dense.gemma3",
    "Gemma3ForConditionalGeneration": "dense.gemma3",
    "Gemma4ForConditionalGeneration": "gemma4.gemma4",
    "GemmaForCausalLM": "dense.llama",
    "Glm4ForCausalLM": "dense.glm4",
    "Glm4MoeForCausalLM": "moe.glm4_moe",
    "Glm4vForConditionalGeneration": "dense.glm4v",
    "Glm4vMoeForConditionalGeneration": "moe.glm4_moe",
    "GlmForCausalLM": "dense.glm",
    "GlmMoeDsaForCausalLM": "latent.deepseek_sparse",
    "GptOssForCausalLM": "moe.gpt_oss",
    "GraniteForCausalLM": "dense.llama",
    "HYV3ForCausalLM": "mixed.hy_v3",
    "KimiK25ForConditionalGeneration": "latent.deepseek",
    "KimiK3ForConditionalGeneration": "kimi.kimi_linear",
    "KimiLinearForCausalLM": "kimi.kimi_linear",
    "LagunaForCausalLM": "mixed.laguna",
    "Lfm2ForCausalLM": "hybrid.lfm2",
    "Lfm2MoeForCausalLM": "hybrid.lfm2_moe",
    "Lfm2VlForConditionalGeneration": "hybrid.lfm2",
    "Llama4ForConditionalGeneration": "moe.llama4",
    "LlamaForCausalLM": "dense.llama",
    "MellumForCausalLM": "mixed.mellum",
    "MiMoForCausalLM": "dense.qwen2",
    "MiMoV2FlashForCausalLM": "mixed.mimo_v2",
    "MiMoV2ForCausalLM": "mixed.mimo_v2",
    "MiniMaxM2ForCausalLM": "moe.minimax_m2",
    "MiniMaxM3ForCausalLM": "compressed.minimax_m3",
    "MiniMaxM3SparseForCausalLM": "compressed.minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "compressed.minimax_m3",
    "Ministral3ForCausalLM": "dense.llama",
    "Mistral3ForConditionalGeneration": "latent.mistral3",
    "MistralForCausalLM": "dense.llama",
    "MixtralForCausalLM": "moe.mixtral",
    "MuseGlimmerForConditionalGeneration": "dense.muse_glimmer",
    "NemotronHForCausalLM": "hybrid.nemotron_h",
    "Olmo2ForCausalLM": "dense.olmo2",
    "Olmo3ForCausalLM": "dense.olmo2",
    "OlmoeForCausalLM": "moe.olmoe",
    "Phi3ForCausalLM": "dense.llama",
    "Qwen2ForCausalLM": "dense.qwen2",
    "Qwen2MoeForCausalLM": "moe.qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "dense.qwen2",
    "Qwen3ForCausalLM": "dense.qwen3",
    "Qwen3MoeForCausalLM": "moe.qwen3_moe",
    "Qwen3NextForCausalLM": "hybrid.qwen3_next",
    "Qwen3VLForConditionalGeneration": "dense.qwen3",
    "Qwen3VLMoeForConditionalGeneration": "moe.qwen3_moe",
    "Qwen3_5ForCausalLM": "hybrid.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "hybrid.qwen3_5",
    "Qwen3_5MoeForCausalLM": "hybrid.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "hybrid.qwen3_5",
    "SeedOssForCausalLM": "dense.seed_oss",
    "Step3p5ForCausalLM": "mixed.step3p5",
    "Step3p7ForConditionalGeneration": "mixed.step3p5",
}

DRAFT_HEADS: dict[str, str] = {
    "Eagle3LlamaForCausalLM": "eagle.eagle3",
    "Eagle3MiniMaxM2ForCausalLM": "eagle.eagle3",
    "Eagle3Qwen2_5vlForCausalLM": "eagle.eagle3",
    "Eagle3Qwen3vlForCausalLM": "eagle.eagle3",
    "EagleLlamaForCausalLM": "eagle.eagle",
    "LlamaForCausalLMEagle3": "eagle.eagle3",
}
"""Draft heads, which are no models of their own. An EAGLE-3 head has an output head, the first EAGLE's has none."""

TOWERS: dict[str, str] = {
    "Glm4vForConditionalGeneration": "towers.glm4v",
    "Glm4vMoeForConditionalGeneration": "towers.glm4v",
    "KimiK25ForConditionalGeneration": "towers.moon_vit",
    "KimiK3ForConditionalGeneration": "towers.moon_vit",
    "Lfm2VlForConditionalGeneration": "towers.lfm2_siglip",
    "Gemma3ForConditionalGeneration": "vision.siglip",
    "Gemma4ForConditionalGeneration": "towers.gemma4",
    "Llama4ForConditionalGeneration": "vision.llama4_vision",
    "MiniMaxM3SparseForConditionalGeneration": "towers.minimax",
    "Mistral3ForConditionalGeneration": "vision.pixtral",
    "MuseGlimmerForConditionalGeneration": "towers.muse",
    "Qwen2_5_VLForConditionalGeneration": "vision.qwen2_5_vision",
    "Qwen3VLForConditionalGeneration": "vision.qwen3_vision",
    "Qwen3VLMoeForConditionalGeneration": "vision.qwen3_vision",
    "Qwen3_5ForConditionalGeneration": "vision.qwen3_vision",
    "Qwen3_5MoeForConditionalGeneration": "vision.qwen3_vision",
    "Step3p7ForConditionalGeneration": "towers.step3p7",
}

BESIDE: dict[str, str] = {
    "DeepseekV4ForCausalLM": "compressed.deepseek_v4_beside",
    "Gemma4ForConditionalGeneration": "gemma4.gemma4_beside",
}
"""What a model has beside its layers, on every stage."""

FIELDS: dict[str, str] = {
    "DeepseekV4ForCausalLM": "compressed.deepseek_v4_fields",
    "Step3p5ForCausalLM": "mixed.step3p5_fields",
    "Step3p7ForConditionalGeneration": "mixed.step3p5_fields",
    "FalconForCausalLM": "dense.falcon_fields",
    "NemotronHForCausalLM": "hybrid.nemotron_h_fields",
}
"""What brings a config to the fields that its family reads."""

FINAL_NORMS: dict[str, tuple[str, ...]] = {
    "FalconForCausalLM": ("norm", "norm.bias"),
    "KimiK3ForConditionalGeneration": ("norm", "output_attn_res_norm", "output_attn_res_proj"),
}
"""Vectors of the hidden size after the last layer, where there are more than one norm."""

TOWER_FIELDS: dict[str, dict[str, Any]] = {
    "Lfm2VlForConditionalGeneration": {
        **{"downsample_factor": 2, "projector_hidden_size": 2560, "projector_bias": True},
        **{"projector_use_layernorm": True, "max_tiles": 10, "tile_size": 512},
    },
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 256},
    "Gemma4ForConditionalGeneration": {"vision_soft_tokens_per_image": 280},
    "MiniMaxM3SparseForConditionalGeneration": {"projector_hidden_size": None, "multimodal_projector_bias": True},
    "Mistral3ForConditionalGeneration": {"spatial_merge_size": 2},
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 6144, "projector_hidden_size": 4096},
    "Step3p7ForConditionalGeneration": {"projector_bias": False},
}
"""Fields of towers that configs have outside `vision_config`, and what transformers takes where they are missing."""

TIED_UNLESS_SAID = (
    *("Ernie4_5_MoeForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"),
    *("FalconForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"),
)
"""Architectures whose transformers config ties the output head to the embedding by default."""

_ENDS = frozenset({"embedding", "final", "head"})
ON_EVERY_STAGE: dict[str, frozenset[str]] = {
    "FalconForCausalLM": _ENDS,
    "GemmaForCausalLM": frozenset({"embedding", "final"}),
    "Gemma2ForCausalLM": frozenset({"embedding", "final"}),
    "Gemma3ForCausalLM": frozenset({"embedding", "final"}),
    "Gemma3ForConditionalGeneration": frozenset({"embedding", "final"}),
    "Gemma4ForConditionalGeneration": frozenset({"embedding", "final"}),
    "GptOssForCausalLM": _ENDS,
    "MixtralForCausalLM": _ENDS,
    "NemotronHForCausalLM": _ENDS,
    "OlmoeForCausalLM": _ENDS,
    "Qwen2MoeForCausalLM": _ENDS,
    "Qwen3MoeForCausalLM": _ENDS,
    "Qwen3NextForCausalLM": frozenset({"embedding", "head"}),
    "Qwen3VLMoeForConditionalGeneration": _ENDS,
    "Qwen3_5ForCausalLM": frozenset({"embedding"}),
    "Qwen3_5ForConditionalGeneration": frozenset({"embedding"}),
    "Qwen3_5MoeForCausalLM": frozenset({"embedding"}),
    "Qwen3_5MoeForConditionalGeneration": frozenset({"embedding"}),
}
"""What vLLM 0.32 builds on each pipeline stage, even on stages that do not use it, by the model's file in vLLM."""
