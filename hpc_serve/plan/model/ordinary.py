"""Ordinary layers: one attention, one MLP or one set of experts, and norms; with encoders and Whisper's decoder.

catalog/architectures.json says how the layers of each family differ: in biases, in norms, in gates, in their experts,
and in the layers that have a sliding window. Encoders attend in both directions and keep no cache; here is what they
have beside such layers. Each layer of Whisper attends to an encoder's output too, whose keys and values vLLM keeps in
blocks of their own; catalog/towers.json has that encoder. special.py has the families that need code.

Sources: vLLM's models/bert.py, roberta.py, modernbert.py, bert_with_rope.py, colbert.py and whisper.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.catalog import load_data
from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import (
    LayerBuilder,
    decoder_layer,
    deepseek_feed_forward,
    experts_or_dense,
    qwen_feed_forward,
)
from hpc_serve.plan.model.spec import CacheKind, DecoderLayer, Part, Vector, Vocabulary, Weight

# -- encoders

_HEAD_BYTES = 4
"""Bytes of an element of a head, which vLLM keeps in float32: `head_dtype` in config/model.py."""
_COLBERT_WIDTH = 128
"""Of a token, where a config does not say it: colbert-ir/colbertv2.0, lightonai/GTE-ModernColBERT-v1."""
_ROTARY = ("rope", "rotary")


def bert_beside(builder: LayerBuilder) -> list[Weight]:
    """Return what BERT and its kin have beside their layers. Positions are a table, unless they are rotary."""
    weights = builder.norms("embeddings.LayerNorm", "embeddings.LayerNorm.bias")
    weights += _table(builder, "token_type_embeddings", builder.get("type_vocab_size", 0))
    if builder.require("position_embedding_type") not in _ROTARY:
        weights += _table(builder, "position_embeddings", builder.require("max_position_embeddings"))
    return weights


def classifier(builder: LayerBuilder, *, bias: bool = True) -> list[Weight]:
    """Return the last layer, with a row for each label. transformers takes two labels where a config names none."""
    labels = len(builder.get("id2label", ())) or builder.get("num_labels", 2)
    return [_of_head("classifier", labels * (builder.hidden_size + bias))]


def classifier_of_decoder(builder: LayerBuilder) -> list[Weight]:
    """Return the layer that vLLM puts on a decoder to make a classifier of it: models/adapters.py."""
    return classifier(builder, bias=False)


def pooled_classifier(builder: LayerBuilder, *, pooler_bias: bool = True) -> list[Weight]:
    """Return BERT's head: a pooler and a classifier."""
    pooler = _of_head("pooler.dense", builder.hidden_size * (builder.hidden_size + pooler_bias))
    return [pooler, *classifier(builder)]


def modernbert_classifier(builder: LayerBuilder) -> list[Weight]:
    """Return ModernBERT's head: a layer, a norm and a classifier."""
    head = pooled_classifier(builder, pooler_bias=builder.flag("classifier_bias"))
    return [_of_head("head.norm", builder.hidden_size), *head]


def colbert(builder: LayerBuilder) -> list[Weight]:
    """Return ColBERT's projection of each token: models/colbert.py, which reads its width off the weights if need
    be."""
    width = next(filter(None, (builder.get(name) for name in ("colbert_dim", "dim", "projection_dim"))), _COLBERT_WIDTH)
    return [_of_head("linear", builder.hidden_size * width)]


def roberta_fields(config: CheckedConfig) -> None:
    """Write RoBERTa's longest input: the first rows of its table of positions are not for tokens."""
    if config["position_embedding_type"] not in _ROTARY:
        config.setdefault("model_max_length", config["max_position_embeddings"] - config.get("pad_token_id", 1) - 1)


def modernbert_fields(config: CheckedConfig) -> None:
    """Write which layers of ModernBERT have a window, and its width, where all families have them.

    Its first layer has no norm before attention, and its embedding has one: together they are those of all layers.
    """
    every = config.get("global_attn_every_n_layers", 3)
    config.setdefault("sliding_window", config.get("local_attention", 128))
    layers = range(config.get("num_hidden_layers", 0))
    kinds = ["sliding_attention" if index % every else "full_attention" for index in layers]
    config.setdefault("layer_types", kinds)


def _of_head(name: str, size: int) -> Weight:
    return Vector(name=name, size=size, element_bytes=_HEAD_BYTES)


def _table(builder: LayerBuilder, name: str, rows: int) -> list[Weight]:
    """Return an embedding table, whose rows vLLM pads and divides as those of the vocabulary."""
    plain = builder.quantization.plain
    return [Vocabulary(name=name, rows=rows, width=builder.hidden_size, scheme=plain)] if rows else []


# -- Whisper's decoder

_WHISPER_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
"""The fields of all families by Whisper's names for its decoder. Its num_hidden_layers are the encoder's."""


def whisper_fields(config: CheckedConfig) -> None:
    """Write the decoder's sizes where all families have them. Positions are a table."""
    for name, own in _WHISPER_NAMES.items():
        config[name] = config[own]
    config["position_embedding_type"] = "absolute"


def whisper(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of the decoder. vLLM gives keys a bias of zeros, which the files do not have."""
    builder = builder.named("model.decoder.layers")
    hidden = builder.hidden_size
    heads = Part(builder.heads, builder.head_dim)
    cross: list[Weight] = [
        builder.linear("encoder_attn.q_proj", hidden, [heads], "column", bias=True),
        builder.linear("encoder_attn.kv_proj", hidden, [heads, heads], "column"),
        builder.linear("encoder_attn.out_proj", heads, [hidden], "row", bias=True),
        builder.vector("encoder_attn.kv_proj.bias", hidden, split=True),
    ]
    zeros = [builder.vector("key_biases", 2 * hidden, split=True)]
    cache = replace(builder.cache(), encoder_positions=builder.require("max_source_positions"))
    return decoder_layer(
        cache,
        builder.attention("self_attn", output_bias=True),
        [builder.vector("self_attn.qkv_proj.bias", 2 * hidden, split=True)],
        cross,
        builder.mlp("mlp", builder.intermediate_size, bias=True, gated=False),
        builder.norms(*(f"norm_{number}" for number in range(6))),  # three, each with a bias
        derived=zeros,
    )


def whisper_beside(builder: LayerBuilder) -> list[Weight]:
    """Return the table of the decoder's positions."""
    positions = builder.require("max_target_positions")
    return [builder.vector("model.decoder.embed_positions", positions * builder.hidden_size)]


# -- ordinary layers

_KINDS = ("full_attention", "sliding_attention")
_NO = (False,)
_FEED_FORWARD = {"qwen": qwen_feed_forward, "deepseek": deepseek_feed_forward}


def ordinary_layer(builder: LayerBuilder, *, name: str) -> DecoderLayer:
    """Return a layer of the family that architectures.json describes under that name."""
    about = load_data("architectures.json")["layers"][name]
    window = _window(builder, about.get("window_pattern"))
    builder = _with_own_heads(builder, about, has_window=window > 0)
    bias, output_bias = (_flag(builder, about.get(key, _NO)) for key in ("bias", "output_bias"))
    kind: CacheKind = "encoder" if about.get("is_encoder") else "sliding" if window else "full"
    more = about.get("window_more", 0) if kind == "sliding" else 0
    return decoder_layer(
        builder.cache(window + more, kind),
        builder.attention("self_attn", bias=bias, output_bias=output_bias),
        _beside_attention(builder, about, has_window=window > 0),
        _feed_forward(builder, about),
        builder.norms(*about["norms"]),
    )


def _with_own_heads(builder: LayerBuilder, about: Mapping[str, Any], *, has_window: bool) -> LayerBuilder:
    """Return the builder with the heads of a layer: those that the config names for it, or for layers with a window."""
    own = {"heads": builder.of_layer(about["heads_by_layer"]) if "heads_by_layer" in about else None}
    own["value_dim"] = builder.get(about["value_dim"]) if "value_dim" in about else None
    in_window = {size: builder.get(field) for size, field in about.get("sizes_in_window", {}).items()}
    if has_window:
        own |= {size: value for size, value in in_window.items() if value}
    return builder.with_heads(**own)


def _beside_attention(builder: LayerBuilder, about: Mapping[str, Any], *, has_window: bool) -> list[Weight]:
    """Return what the attention has beside its projections: norms over queries and keys, a gate, sinks."""
    weights: list[Weight] = []
    if _flag(builder, about.get("query_key_norms", _NO)):
        weights += builder.query_key_norms()
    if norms := about.get("norms_of_all_heads"):
        for name, count in (("q_norm", builder.heads), ("k_norm", builder.kv_heads)):
            weights.append(builder.vector(f"self_attn.{name}", count * builder.head_dim, split=norms == "divided"))
    whole, by_head = about.get("gate", False), _first(builder, about.get("head_gate", _NO))
    if whole or by_head:
        name, width = "gate_proj" if whole else "g_proj", 1 if by_head in (True, "per-head") else builder.head_dim
        weights.append(builder.linear(f"self_attn.{name}", builder.hidden_size, [Part(builder.heads, width)], "column"))
    if _flag(builder, about.get("sinks_in_window" if has_window else "sinks", _NO)):
        weights.append(builder.vector("self_attn.sinks", builder.heads, split=True))
    return weights


def _feed_forward(builder: LayerBuilder, about: Mapping[str, Any]) -> list[Weight]:
    """Return the MLP of a layer, or its experts."""
    prefix = about.get("feed_forward_name", "mlp")
    if "feed_forward" in about:
        return _FEED_FORWARD[about["feed_forward"]](builder, prefix)
    bias = _flag(builder, about.get("mlp_bias", _NO))
    if "experts" in about:
        return experts_or_dense(builder, prefix, **about["experts"], mlp_bias=bias)
    weights = builder.mlp(prefix, builder.intermediate_size, bias=bias, gated=about.get("mlp_gate", True))
    if "learned_activation" in about:
        weights.append(builder.vector(f"{prefix}.act_fn", about["learned_activation"]))
    return weights


def _flag(builder: LayerBuilder, spec: Sequence[Any]) -> bool:
    return bool(_first(builder, spec))


def _first(builder: LayerBuilder, spec: Sequence[Any]) -> Any:
    """Return the first of these fields that the config has; the last of `spec` is the default. All are read."""
    *names, default = spec
    found = [builder.get(name) for name in names]
    return next((value for value in found if value is not None), default)


def _window(builder: LayerBuilder, pattern: Any) -> int:
    """Return the sliding window of a layer, or 0.

    If the config has `layer_types`, they decide; next decides `max_window_layers`, the first layer with the window.
    Otherwise every so many layers attend to all tokens and the others have the window: `pattern` or the field that it
    names with its default. If that is 0, all layers have the window. None: the family has no windows.
    """
    if pattern is None:
        return 0
    if not isinstance(pattern, int):
        pattern = builder.get(*pattern)
    turn = len(pattern) if isinstance(pattern, str) else pattern  # a letter for each layer of one turn ("LLLG")
    window, kind = builder.get("sliding_window", 0), builder.of_layer("layer_types")
    first = builder.get("max_window_layers")
    if kind not in (None, *_KINDS):
        raise InvalidRequestError(f"The config's layer_types has {str(kind)[:40]!r}: use {' or '.join(_KINDS)}.")
    if builder.get("use_sliding_window") is False:
        return 0
    if kind:
        slides = kind == "sliding_attention"
    elif first is not None:
        slides = builder.index >= first
    else:
        slides = not turn or (builder.index + 1) % turn != 0
    return window if slides else 0
