"""Checks the fields of a Hugging Face config before anything is calculated with them.

Anybody can write a config. A zero among the sizes, or text in place of a number, is an error that names the field. A
field that is null counts as missing. A field that is not listed here is left as it is. What is read is remembered, so
that config_keys.py can name what nobody has read.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from hpc_serve.errors import InvalidRequestError

_LARGEST = 2**40
_MOST_LAYERS = 2_000
"""Ten times as many as any model has. A plan for more would take longer than a second."""
_MOST_FIELDS = 10_000
_DEEPEST = 8
"""Objects within objects. Published configs have four."""

_LAYERS = ("num_hidden_layers", "depth")
_AT_LEAST_ONE = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
    *("head_dim", "attention_head_dim", "max_position_embeddings", "model_max_length"),
    *("original_max_position_embeddings", "decoder_sparse_step", "full_attention_interval", "moe_layer_interval"),
    *("interleave_moe_layer_step", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "linear_value_head_dim", "conv_kernel", "mamba_head_dim", "mamba_num_heads"),
    *("n_groups", "ssm_state_size", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"),
    *("image_size", "patch_size", "in_channels", "num_channels", "num_position_embeddings"),
    *("out_hidden_size", "spatial_merge_size", "temporal_patch_size", "vision_output_dim", "bits", "w_bit", "num_bits"),
    *("projector_input_dim", "projector_output_dim", "no_rope_layer_interval", "num_ln_in_parallel_attn"),
    *("n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_seq_length", "seq_len"),
    *("moe_latent_size", "mm_tokens_per_image", "n_heads_in_group", "index_n_heads", "index_head_dim"),
    "index_topk",
    *("index_topk_freq", "conv_L_cache", "conv_dim", "block_multiple_of", "swa_num_attention_heads"),
    *("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "num_attention_groups", "downsample_factor"),
    *("projector_hidden_size", "tile_size", "num_patches", "num_sliding_attention_heads", "num_heads"),
    *("global_attn_every_n_layers", "global_head_dim", "num_global_key_value_heads", "position_embedding_size"),
    *("pooling_kernel_size", "vision_soft_tokens_per_image", "vocab_size_per_layer_input"),
    *("hc_mult", "o_groups", "o_lora_rank", "short_conv_kernel_size", "sparse_block_size", "sparse_index_dim"),
    *("sparse_num_index_heads", "sparse_topk_blocks", "routed_expert_hidden_size", "qkv_hidden_size"),
    *("width", "layers", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states"),
    *("merge_size", "patch_temporal", "pos_emb_height", "pos_emb_width"),
)
_AT_LEAST_ZERO = (
    *("intermediate_size", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_experts", "n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
    *("experts_per_token", "first_k_dense_replace", "sliding_window", "attention_chunk_size", "q_lora_rank"),
    *("qk_nope_head_dim", "rotary_dim", "moe_shared_expert_intermediate_size"),
    *(
        "moe_num_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
        "num_dense_layers",
        "share_expert_dim",
        "moe_k",
    ),
    *("moe_top_k", "num_experts_per_token", "top_k_experts", "num_kv_shared_layers"),
    *("hidden_size_per_layer_input", "expert_intermediate_size"),
    *("expert_hidden_dim", "block_ff_dim", "max_tiles", "index_skip_topk_offset", "vt_num_hidden_layers"),
    *("vt_hidden_size", "vt_intermediate_size", "init_pos_emb_height", "init_pos_emb_width"),
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "max_window_layers"),
    *("dense_intermediate_size", "num_hash_layers", "intermediate_size_mlp", "attn_res_block_size"),
    *("moe_layer_start_index", "moe_layer_end_index"),
)
_GROUP_SIZES = ("group_size",)
_NUMBERS = (
    "factor",
    "ffn_mult",
    "block_ffn_dim_multiplier",
    "mlp_ratio",
    "partial_rotary_factor",
    "pixel_shuffle_ratio",
)
_LISTS = ("architectures",)
_PAIRS = ("merge_kernel_size",)
_LISTS_OF_NUMBERS = (
    *("compress_ratios", "sparse_attention_freq", "sparse_disable_index_value", "mlp_only_layers", "moe_layers"),
    *("no_rope_layers", "deepstack_visual_indexes", "fullatt_block_indexes", "weight_block_size", "full_attn_idxs"),
    *("hybrid_layer_pattern", "num_attention_heads_per_layer", "kda_layers", "full_attn_layers"),
)
_LISTS_OF_TEXTS = (
    *("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "modules_to_not_convert", "ignore"),
    *("ignored_layers", "exclude", "exclude_modules", "llm_int8_skip_modules"),
)
_OBJECTS = (
    *("text_config", "vision_config", "rope_scaling", "rope_parameters", "quantization_config"),
    *("compression_config", "attention_other_setting"),
    *("config_groups", "weights", "input_activations", "attention", "ffn"),
    *("quantization", "global_quant_config", "weight"),
    *("linear_attn_config", "sparse_attention_config", "img_token_compression_config"),
)
_OBJECTS_OF_OBJECTS = "config_groups."
_LISTS_OF_OBJECTS = ("block_configs",)
_PATTERNS = ("sliding_window_pattern",)
_EVERY = ("moe_layer_freq",)
"""A number (every so many layers), or a 0 or a 1 for each layer."""
_TEXTS = (
    *("quant_method", "quant_algo", "hybrid_override_pattern", "model_type", "torch_dtype", "dtype"),
    *("expert_dtype", "kv_cache_quant_algo", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "mm_projector_type"),
    *("moe_quant_algo", "norm_type", "qscheme", "strategy", "topk_method"),
)
_FLAGS = (
    *("add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_bias", "attention_k_eq_v"),
    *("attention_out_bias", "attn_bias", "bias", "block_auto_adjust_ff_dim", "conv_bias", "enable_moe_block"),
    *("latent_moe_use_norm", "linear_bias", "load_in_4bit", "load_in_8bit", "mla_use_output_gate", "mlp_bias"),
    *("multi_query", "multimodal_projector_bias", "new_decoder_architecture", "no_op", "parallel_attn"),
    *("patch_embed_proj_bias", "projector_bias", "projector_use_layernorm", "qk_norm", "qkv_bias"),
    *("replace_with_linear", "sym", "symmetric", "tie_word_embeddings", "use_abs_posemb", "use_bias", "use_cls_token"),
    *("use_conv_bias", "use_expert_bias", "use_full_rank_gate", "use_head_wise_attn_gate", "use_ln_post", "use_ln_pre"),
    *("use_qk_norm", "use_routing_bias", "use_sliding_window", "use_sparse_attention", "vision_use_head", "zero_point"),
)
_KINDS = ("gating",)
"""Whether there is something, or which kind of it."""
_ENUMERATIONS = ("moe_layers_enum",)
"""Numbers of layers in a text, as 3,4,5."""


class CheckedConfig(dict[str, Any]):
    """A config, or an object in it, whose listed fields were checked and whose nulls were removed.

    `config[name]` raises InvalidRequestError where the field is missing. `read` holds the fields that `config[name]`
    and `get` were asked for, with the names of the objects that they lie in.
    """

    def __init__(self, config: Mapping[str, Any], *, path: str = "", read: set[str] | None = None) -> None:
        super().__init__()
        self.path = path
        self.read: set[str] = set() if read is None else read
        if path.count(".") > _DEEPEST:
            raise InvalidRequestError(f"The config has objects within objects, more than {_DEEPEST} deep: {path[:60]}.")
        if len(config) > _MOST_FIELDS:
            raise InvalidRequestError(f"The config has {len(config):,} fields: at most {_MOST_FIELDS:,} are read.")
        for name, value in config.items():
            if value is not None:
                self[str(name)] = self._checked(str(name), value)

    def __missing__(self, name: str) -> Any:
        raise missing(f"{self.path}{name}")

    def __getitem__(self, name: str) -> Any:
        self.read.add(self.path + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(self.path + name)
        return super().get(name, default)

    def peek(self, name: str, default: Any = None) -> Any:
        """The field as `get` has it, which does not count as read."""
        return super().get(name, default)

    def ignore(self, name: str) -> None:
        """Leave the field out, as if it were not there."""
        self.pop(name, None)

    def _checked(self, name: str, value: Any) -> Any:
        kind = _OBJECTS[0] if self.path.endswith(_OBJECTS_OF_OBJECTS) else name
        for names, is_right, wanted in _RULES:
            if kind in names and not is_right(value):
                raise InvalidRequestError(f"The config's {self.path}{name} is {_shown(value)}: it must be {wanted}.")
        if kind in _OBJECTS:
            return CheckedConfig(value, path=f"{self.path}{name}.", read=self.read)
        if name in _LISTS_OF_OBJECTS:
            inside = f"{self.path}{name}"
            return [CheckedConfig(one, path=f"{inside}[{index}].", read=self.read) for index, one in enumerate(value)]
        return value


def _shown(value: Any) -> str:
    """The value in at most 40 characters."""
    text = reprlib.repr(value) if isinstance(value, (list, tuple, Mapping)) or type(value) is int else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def missing(field: str) -> InvalidRequestError:
    """The error for a missing field that is needed."""
    return InvalidRequestError(f"The config has no {field!r}, without which the model's size is unknown.")


def _is_whole(value: Any, least: int, most: int = _LARGEST) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _LARGEST and math.isfinite(value)


def _is_every(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) <= _MOST_FIELDS
    return _is_whole(value, 1) or (is_list and all(type(one) is int and one in (0, 1) for one in value))


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) <= _MOST_FIELDS
    return is_list and all(_is_whole(one, 0) for one in value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_whole(one, 1) for one in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def _are_objects(value: Any) -> bool:
    is_short = isinstance(value, (list, tuple)) and len(value) <= _MOST_FIELDS
    return is_short and all(isinstance(one, Mapping) for one in value)


def _is_enumeration(value: Any) -> bool:
    numbers = value.split(",") if isinstance(value, str) else []
    return 0 < len(numbers) <= _MOST_FIELDS and all(one.isdecimal() and len(one) <= 5 for one in numbers)


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_LAYERS, lambda value: _is_whole(value, 1, _MOST_LAYERS), f"a whole number from 1 to {_MOST_LAYERS:,}"),
    (_AT_LEAST_ONE, lambda value: _is_whole(value, 1), "a whole number of at least 1"),
    (_AT_LEAST_ZERO, lambda value: _is_whole(value, 0), "a whole number, not negative"),
    (_GROUP_SIZES, lambda value: _is_whole(value, -1), "a whole number, or -1"),
    (_NUMBERS, _is_number, "a number above 0"),
    (_LISTS, lambda value: isinstance(value, (list, tuple)), "a list"),
    (_PAIRS, _is_pair, "two whole numbers of at least 1"),
    (_LISTS_OF_NUMBERS, _are_numbers, f"a list of whole numbers, at most {_MOST_FIELDS:,}"),
    (_LISTS_OF_TEXTS, _are_texts, "a list of texts"),
    (_OBJECTS, lambda value: isinstance(value, Mapping), "an object"),
    (_LISTS_OF_OBJECTS, _are_objects, f"a list of objects, at most {_MOST_FIELDS:,}"),
    (_PATTERNS, lambda value: _is_whole(value, 1) or isinstance(value, str), "a whole number of at least 1, or a text"),
    (_EVERY, _is_every, "a whole number of at least 1, or a list of 0 and 1"),
    (_TEXTS, lambda value: isinstance(value, str), "a text"),
    (_FLAGS, lambda value: value in (False, True), "true or false"),
    (_KINDS, lambda value: isinstance(value, (bool, str)), "true, false or a text"),
    (_ENUMERATIONS, _is_enumeration, "numbers of layers, with commas between them"),
)
