"""Makes tiny mixtures of experts with random weights: like Qwen2-MoE, with a shared expert, and like DeepSeek-V2, with
shared experts and latent attention.

The tokenizer is that of `hpc_serve.demo_model`. They compute in 32 bit: the same layers, divided otherwise, then give
the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import VOCAB_SIZE, make_demo_model
from hpc_serve.vllm.arguments import ARGS_FILE

HIDDEN, EXPERTS, CHOSEN, INNER, LAYERS, HEADS = 128, 8, 2, 64, 3, 4
_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 2 * INNER,
        **_COMMON,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,  # with the rotary part 576, which is a size that vLLM's MLA takes
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        **_COMMON,
    },
}


def make_moe_model(folder: Path, like: str) -> Path:
    """Write a tiny model of that name of CONFIGS into a new folder; returns the folder."""
    import torch
    from safetensors.torch import save_file

    make_demo_model(folder)
    words = (folder / ARGS_FILE).read_text()
    (folder / ARGS_FILE).write_text(words.replace("--dtype bfloat16", "--dtype float32"))
    (folder / "config.json").write_text(json.dumps(CONFIGS[like]))
    random = torch.Generator().manual_seed(7)
    tensors = {}
    for name, dimensions in _tensors(CONFIGS[like]):
        values = torch.randn(dimensions, generator=random) * (8.0 if name == "lm_head.weight" else 1.5)
        is_vector = len(dimensions) == 1
        norm = torch.ones(dimensions) if name.endswith("norm.weight") else torch.zeros(dimensions)
        tensors[name] = (norm if is_vector else values * dimensions[-1] ** -0.5).to(torch.bfloat16)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return folder


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    is_latent = "kv_lora_rank" in config
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    for index in range(LAYERS):
        name = f"model.layers.{index}"
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        yield from ((f"{name}.self_attn.{key}", size) for key, size in _attention(config))
        yield f"{name}.post_attention_layernorm.weight", (HIDDEN,)
        if index < config.get("first_k_dense_replace", 0):
            yield from _mlp(f"{name}.mlp", config["intermediate_size"])
            continue
        yield f"{name}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            yield from _mlp(f"{name}.mlp.experts.{expert}", INNER)
        yield from _mlp(f"{name}.mlp.shared_expert{'s' if is_latent else ''}", 2 * INNER)
        if not is_latent:
            yield f"{name}.mlp.shared_expert_gate.weight", (1, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN)


def _mlp(name: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, HIDDEN)
    yield f"{name}.up_proj.weight", (inner, HIDDEN)
    yield f"{name}.down_proj.weight", (HIDDEN, inner)


def _attention(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    if "kv_lora_rank" not in config:
        width, key = 32 * HEADS, 32 * config["num_key_value_heads"]
        for part, rows in (("q", width), ("k", key), ("v", key)):
            yield f"{part}_proj.weight", (rows, HIDDEN)
            yield f"{part}_proj.bias", (rows,)
        yield "o_proj.weight", (HIDDEN, width)
        return
    latent, rotary, plain, value = (
        config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    yield "q_proj.weight", (HEADS * (plain + rotary), HIDDEN)
    yield "kv_a_proj_with_mqa.weight", (latent + rotary, HIDDEN)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (HEADS * (plain + value), latent)
    yield "o_proj.weight", (HIDDEN, HEADS * value)
