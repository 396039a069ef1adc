"""Which fields of a config may be passed over, and which nobody has read although they look like a size.

A field counts as read where a family asks for it while the model is built. The others are passed over if they are
known to change no size: catalog/config_keys.json has those that transformers knows (the tests' support/config_keys.py
measures them), the lists below have what configs hold beyond transformers' own classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import config_keys
from hpc_serve.plan.model.config_check import CheckedConfig

ALLOW_UNKNOWN_KEYS = "--allow-unknown-config-keys"

_NAMES = frozenset(
    (
        *("architectures", "model_type", "auto_map", "torch_dtype", "tokenizer_class", "tokenizer_model_max_length"),
        # training, and how experts are chosen
        *("pretraining_tp", "ep_size", "aux_loss_alpha", "seq_aux", "topk_group", "n_group", "router_aux_loss_coef"),
        *("norm_topk_prob", "topk_method", "scoring_func", "num_experts_per_tok", "moe_router_dtype", "seed"),
        *("router_jitter_noise", "jitter_noise", "output_router_logits", "router_z_loss_coef", "num_labels"),
        *("routed_scaling_factor", "moe_shared_expert_overlap", "moe_router_load_balancing_type", "use_cache"),
        # numbers that scale or clip activations, and positions
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
        *("query_pre_attn_scalar", "attn_scale", "floor_scale", "attn_temperature_tuning", "clip_qkv", "swiglu_limit"),
        *(
            "rope_theta",
            "rope_local_base_freq",
            "swa_rope_theta",
            "rope_interleave",
            "max_seq_len_for_attn_temperature",
        ),
        *("original_max_position_embeddings", "initializer_factor"),
        *("residual_in_fp32", "rescale_prenorm_residual"),
        *("hidden_act", "hidden_activation", "activation", "act_fn", "mamba_hidden_act", "mlp_hidden_act"),
    )
)
_ENDINGS = re.compile(
    r"(?:^mtp_.*|_token_ids?|_token_index|_tok_index|_token|_dropout(?:_prob|_rate|_p)?|_pdrop|^dropout|_eps|_epsilon"
    r"|initializer_range|_init_std|^init_std|_coeff?|_loss_weight|_softcap(?:ping)?|^_.*)$"
)
"""Endings of names: tokens, dropout, small numbers in norms, weights' first values, and names that begin with "_"."""

_OF_QUANTIZATION = frozenset(
    (
        *(
            "config_groups",
            "version",
            "producer",
            "format",
            "quantization_status",
            "global_compression_ratio",
            "targets",
            "fmt",
        ),
        *("activation_scheme", "activation_scale_ub", "input_activations", "output_activations", "kv_cache_scheme"),
        *("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "dynamic", "block_structure"),
        *("desc_act", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "meta", "dataset"),
        *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id"),
        *("use_cuda_fp16", "use_exllama", "max_input_length", "exllama_config", "cache_block_outputs", "tokenizer"),
        *("modules_in_block_to_quantize", "checkpoint_format", "backend", "do_fuse", "fuse_max_seq_len", "nsamples"),
        *("modules_to_fuse", "exllama_version", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload"),
        *("llm_int8_has_fp16_weight", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "_load_in_4bit", "_load_in_8bit", "group", "algo_config", "export"),
        *("kv_cache_quant_config", "kv_cache_post_rope", "softmax_quant_spec", "input_tensors", "output_tensors"),
        *("bias", "iters", "low_gpu_mem_usage", "seqlen", "gradient_accumulate_steps", "autoround_version", "lr"),
        *("ch_axis", "layer_type_quant_config", "train_bs", "quant_block_list", "supported_types", "minmax_lr"),
        *("to_quant_block_names", "quantized_layers"),
    )
)
"""Fields within a `quantization_config` that change no weight's size: how it was made, and the type of activations."""

_SPARSE = ("qk_head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration")
_DELTA = ("activation_situ_beta", "activation_situ_linear_beta", "moe_renormalize", "num_expert_group")
_BLOCKS = ("num_mtp_modules", "shared_intermediate_size", "use_gemma_norm", "qk_norm_type")
_CHOICE = ("sparse_local_block", "sparse_init_block", "sparse_score_type")
"""How tokens are chosen."""
_OF_MINIMAX_M3 = (*_BLOCKS, *(f"sparse_attention_config.{name}" for name in _CHOICE))
_LFM2 = ("block_dim", "conv_dim_out", "num_heads", "theta", "block_mlp_init_scale", "block_out_init_scale")
_OF_EAGLE3 = ("draft_vocab_size", "eagle_config", "target_layer_count")
_OF_FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            *("Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM", "LlamaForCausalLMEagle3"),
            *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
        ],
        _OF_EAGLE3,
    ),
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV4ForCausalLM": ("hc_sinkhorn_iters", "compress_rope_theta", "quantization_config.group_size"),
    "Gemma4ForConditionalGeneration": (
        *("vision_config.default_output_length", "vision_config.global_head_dim", "vision_config.standardize"),
        *("vision_config.image_seq_length", "vision_config.video_seq_length", "vision_config.max_position_embeddings"),
        *("vision_config.id2label", "vision_config.label2id"),
    ),
    "GlmMoeDsaForCausalLM": _SPARSE,
    "KimiK25ForConditionalGeneration": (
        *("ignore_index", "vision_config.init_pos_emb_time", "vision_config.mm_hidden_size"),
        *(
            "vision_config.text_hidden_size",
            "vision_config.vt_num_attention_heads",
            "vision_config.num_attention_heads",
        ),
        *("vision_config.pos_emb_time", "text_config.qk_head_dim", "text_config.head_dim"),
    ),
    "KimiK3ForConditionalGeneration": (
        *("ignore_index", "vision_config.init_pos_emb_time", "vision_config.mm_hidden_size"),
        *("vision_config.text_hidden_size", "vision_config.vt_num_attention_heads"),
        *(f"text_config.{name}" for name in _DELTA),
    ),
    "KimiLinearForCausalLM": _DELTA,
    "MiniMaxM3ForCausalLM": _OF_MINIMAX_M3,
    "MiniMaxM3SparseForCausalLM": _OF_MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": (
        *("image_grid_pinpoints", "image_seq_length", "process_image_mode", "vision_feature_layer"),
        *("vision_config.vision_segment_max_frames", "vision_config.projection_dim", "vision_config.vocab_size"),
        *("vision_config.num_attention_heads", "img_token_compression_config"),
        *(f"text_config.{name}" for name in _OF_MINIMAX_M3),
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": (
        *("encoder_patch_size", "min_image_tokens", "max_image_tokens", "min_tiles", "max_pixels_tolerance"),
        *(f"text_config.{name}" for name in _LFM2),
    ),
    "MiMoV2FlashForCausalLM": ("sliding_window_size", "attention_chunk_size", "attention_value_scale"),
    "MiMoV2ForCausalLM": ("sliding_window_size", "attention_chunk_size", "attention_value_scale"),
    "FalconForCausalLM": ("ff_factor",),
    "GptOssForCausalLM": ("initial_context_length",),
    "MiniMaxM2ForCausalLM": ("mlp_intermediate_size", "mtp_transformer_layers", "qk_norm_type"),
    "Llama4ForConditionalGeneration": ("vision_config.vision_feature_layer",),
    "Mistral3ForConditionalGeneration": ("vision_feature_layer",),
    "MuseGlimmerForConditionalGeneration": (
        *("text_config.layer_rope_theta", "vision_config.layer_types", "vision_config.max_position_embeddings"),
    ),
    "NemotronHForCausalLM": ("chunk_size", "expand", "time_step_limit", "time_step_rank", "num_logits_to_keep"),
    "Phi3ForCausalLM": ("full_attn_mod", "interpolate_factor"),
    "Step3p5ForCausalLM": ("attention_other_setting.true_head_dim", "partial_rotary_factors"),
    "Step3p7ForConditionalGeneration": (
        *("text_config.attention_other_setting.true_head_dim", "text_config.partial_rotary_factors"),
        *("vision_config.heads", "vision_config.num_attention_heads", "understand_projector_stride"),
        *("vision_config.max_position_embeddings", "text_config.num_sliding_attention_heads"),
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        *("vision_config.in_chans", "vision_config.spatial_patch_size", "vision_config.window_size"),
        *("vision_config.fullatt_block_indexes", "vision_config.tokens_per_second"),
    ),
}
"""Fields that published configs of a family have, and neither transformers' model nor vLLM's reads."""

_ASSUMED: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {"attention_bias": True},
    "Llama4ForConditionalGeneration": {"multi_modal_projector_bias": False},
    "KimiK3ForConditionalGeneration": {"mla_use_nope": True},
    "KimiLinearForCausalLM": {"mla_use_nope": True},
    "MiMoForCausalLM": {"attention_bias": True},
    "MiniMaxM2ForCausalLM": {"use_qk_norm": True},
    "MiniMaxM3ForCausalLM": {"use_qk_norm": True, "attention_output_gate": False},
    "MiniMaxM3SparseForCausalLM": {"use_qk_norm": True, "attention_output_gate": False},
    "MiniMaxM3SparseForConditionalGeneration": {"use_qk_norm": True, "attention_output_gate": False},
    "Qwen3_5ForCausalLM": {"attn_output_gate": True},
    "Qwen3_5ForConditionalGeneration": {"attn_output_gate": True},
    "Qwen3_5MoeForCausalLM": {"attn_output_gate": True},
    "Qwen3_5MoeForConditionalGeneration": {"attn_output_gate": True},
    "Qwen3MoeForCausalLM": {"use_qk_norm": True},
    "Qwen3VLMoeForConditionalGeneration": {"use_qk_norm": True},
}
"""What a family is built with whatever the config says: another value is refused."""

_EVERYWHERE_ALIKE = ("full_attention", "indexed_attention", "deepseek_sparse_attention")
"""Kinds of layers whose difference a family reads elsewhere."""

_TELLING_TRUE = re.compile(
    r"(?:^|_)(?:bias|norm|tie|tied|shared?|experts?|moe|lora|latent|mla|sinks?|multi_query)(?:_|$)"
)
_TELLING_NUMBER = re.compile(r"(?:^|_)(?:mult|multiplier|ratio|expan\w*|width|dim|size)(?:_|$)")
_TELLING_TEXT = re.compile(r"(?:^|_)pattern(?:_|$)")


def check_all_read(config: CheckedConfig, architecture: str, *, name: str, allow: bool) -> tuple[str, ...]:
    """The fields of a config that look like a size and were not read, each with its value.

    Raises InvalidRequestError where there are some, unless `allow`.
    """
    unknown = tuple(f"{path} ({_short(value)})" for path, value in _unread(config, config, architecture))
    if unknown and not allow:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise InvalidRequestError(
            f"The config of {name} has {', '.join(unknown[:3])}{more}, which this planner does not know for "
            f"{architecture}: the model may be of another size than it would say. {ALLOW_UNKNOWN_KEYS} plans "
            "without it, at your own risk."
        )
    return unknown


def _unread(config: CheckedConfig, inner: CheckedConfig, architecture: str) -> Iterator[tuple[str, Any]]:
    """The path and the value of each field that was not read, is not known to be without a size, and looks like one."""
    text = config.peek("text_config")
    for name, value in inner.items():
        path = inner.path + name
        is_read = path in config.read
        if name in ("rope_scaling", "rope_parameters"):
            continue  # they say how positions are turned, and architectures.py reads what of them makes contexts longer
        if is_read and isinstance(value, CheckedConfig):
            yield from _unread(config, value, architecture)
        elif is_read and isinstance(value, list) and value and isinstance(value[0], CheckedConfig):
            for one in value:
                yield from _unread(config, one, architecture)
        elif architecture in _ASSUMED and name in _ASSUMED[architecture]:
            if value != _ASSUMED[architecture][name]:
                yield path, value
        elif is_read or _is_passed_over(path, name, value, architecture) or not looks_like_size(name, value):
            continue
        elif inner is config and isinstance(text, CheckedConfig) and text.peek(name) == value:
            continue  # what the decoder's own config says too
        else:
            yield path, value


def _is_passed_over(path: str, name: str, value: Any, architecture: str) -> bool:
    keys = config_keys()
    if path in _OF_FAMILIES.get(architecture, ()):
        return True
    if "quantization_config." in path or "compression_config." in path:
        return name in _OF_QUANTIZATION or name in _NAMES
    if name in _NAMES or name in keys.generic or _ENDINGS.search(name):
        return True
    if {path, f"text_config.{path}"} & keys.no_weight_changes.get(architecture, frozenset()):
        return True
    if name == "attn_type_list":
        return all(kind == 1 for kind in value)
    return name == "layer_types" and all(kind in _EVERYWHERE_ALIKE for kind in value)


def looks_like_size(name: str, value: Any, *, depth: int = 0) -> bool:
    """Whether a field may change a model's size: whole numbers but 0, lists, objects with such, and some by their name.

    >>> looks_like_size("moe_latent_size", 1024), looks_like_size("hidden_act", "silu")
    (True, False)
    """
    if isinstance(value, bool):
        return value and _TELLING_TRUE.search(name) is not None
    if isinstance(value, int):
        return value != 0
    if isinstance(value, float):
        return (value > 1 and value.is_integer()) or (value != 0 and _TELLING_NUMBER.search(name) is not None)
    if isinstance(value, str):
        return _TELLING_TEXT.search(name) is not None
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    if isinstance(value, Mapping):
        return depth > 8 or any(looks_like_size(str(key), one, depth=depth + 1) for key, one in value.items())
    return False


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = str(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 30 else f"{text[:27]}..."
