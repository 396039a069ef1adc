"""What encoders have beside their layers: tables of positions and of segments, a norm, and the head of a classifier.

Encoders attend in both directions and keep no cache. catalog/architectures.json describes their layers, ordinary.py
builds them. Sources: vLLM's models/bert.py, roberta.py, modernbert.py, bert_with_rope.py and colbert.py.
"""

from __future__ import annotations

from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder
from hpc_serve.plan.model.weights import Vector, Vocabulary, Weight

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
