"""What encoders have beside their layers: tables of positions and of segments, a norm, and the head of a classifier.

Encoders attend in both directions and keep no cache. catalog/architectures.json describes their layers, ordinary.py
builds them. Sources: vLLM's models/bert.py, roberta.py, modernbert.py, bert_with_rope.py and colbert.py.
"""

from __future__ import annotations

from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder
from hpc_serve.plan.model.weights import Block, Vector, Vocabulary, Weight

_HEAD_BYTES = 4
"""Bytes of an element of a head, which vLLM keeps in float32: `head_dtype` in config/model.py."""
_COLBERT_WIDTH = 128
"""Of a token, where a config does not say it: colbert-ir/colbertv2.0, lightonai/GTE-ModernColBERT-v1."""
_ROTARY = ("rope", "rotary")


def bert_beside(builder: LayerBuilder) -> Block:
    """Return what BERT and its kin have beside their layers. Positions are a table, unless they are rotary."""
    weights = builder.norms("embeddings.LayerNorm", "embeddings.LayerNorm.bias")
    weights += _table(builder, "token_type_embeddings", builder.get("type_vocab_size", 0))
    if builder.require("position_embedding_type") not in _ROTARY:
        weights += _table(builder, "position_embeddings", builder.require("max_position_embeddings"))
    return Block(weights=tuple(weights))


def bert_classifier(builder: LayerBuilder) -> Block:
    """Return the same with a pooler and a classifier."""
    return Block(weights=(*bert_beside(builder).weights, *_head(builder, pooler_bias=True)))


def bert_tagger(builder: LayerBuilder) -> Block:
    """Return the same with a classifier of tokens."""
    return Block(weights=(*bert_beside(builder).weights, *_classifier(builder)))


def modernbert_classifier(builder: LayerBuilder) -> Block:
    """Return ModernBERT's head: a layer, a norm and a classifier."""
    norm = Vector(name="head.norm", size=builder.hidden_size, element_bytes=_HEAD_BYTES)
    return Block(weights=(norm, *_head(builder, pooler_bias=bool(builder.get("classifier_bias", False)))))


def colbert(builder: LayerBuilder) -> Block:
    """Return what BERT has beside its layers, with ColBERT's projection of each token."""
    return Block(weights=(*bert_beside(builder).weights, *colbert_modernbert(builder).weights))


def colbert_modernbert(builder: LayerBuilder) -> Block:
    """Return ColBERT's projection alone: models/colbert.py, which reads its width off the weights if need be."""
    width = next(filter(None, (builder.get(name) for name in ("colbert_dim", "dim", "projection_dim"))), _COLBERT_WIDTH)
    return Block(weights=(Vector(name="linear", size=builder.hidden_size * width, element_bytes=_HEAD_BYTES),))


def bert_fields(config: CheckedConfig) -> None:
    """Write that positions are a table, where a config does not say what they are."""
    config.setdefault("position_embedding_type", "absolute")


def rotary_fields(config: CheckedConfig) -> None:
    """Write that positions are rotary, where a config does not say what they are."""
    config.setdefault("position_embedding_type", "rope")


def roberta_fields(config: CheckedConfig) -> None:
    """Write RoBERTa's longest input: the first rows of its table of positions are not for tokens."""
    bert_fields(config)
    if config["position_embedding_type"] not in _ROTARY:
        config.setdefault("model_max_length", config["max_position_embeddings"] - config.get("pad_token_id", 1) - 1)


def modernbert_fields(config: CheckedConfig) -> None:
    """Write which layers of ModernBERT have a window, and its width, where all families have them.

    Its first layer has no norm before attention, and its embedding has one: together they are those of all layers.
    """
    every = config.get("global_attn_every_n_layers", 3)
    config.setdefault("sliding_window", config.get("local_attention", 128))
    config.setdefault(
        "layer_types",
        [
            "sliding_attention" if index % every else "full_attention"
            for index in range(config.get("num_hidden_layers", 0))
        ],
    )


def classifier_of_decoder(builder: LayerBuilder) -> Block:
    """Return the layer that vLLM puts on a decoder to make a classifier of it: models/adapters.py."""
    return Block(weights=tuple(_classifier(builder, bias=False)))


def _table(builder: LayerBuilder, name: str, rows: int) -> list[Weight]:
    """Return an embedding table, whose rows vLLM pads and divides as those of the vocabulary."""
    plain = builder.quantization.plain
    return [Vocabulary(name=name, rows=rows, width=builder.hidden_size, scheme=plain)] if rows else []


def _head(builder: LayerBuilder, *, pooler_bias: bool) -> list[Weight]:
    size = builder.hidden_size * (builder.hidden_size + pooler_bias)
    return [Vector(name="pooler.dense", size=size, element_bytes=_HEAD_BYTES), *_classifier(builder)]


def _classifier(builder: LayerBuilder, *, bias: bool = True) -> list[Weight]:
    """Return the last layer, with a row for each label. transformers takes two labels where a config names none."""
    labels = len(builder.get("id2label", ())) or builder.get("num_labels", 2)
    return [Vector(name="classifier", size=labels * (builder.hidden_size + bias), element_bytes=_HEAD_BYTES)]
