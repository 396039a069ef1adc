"""Whisper's decoder: each layer attends to the tokens before, and to the output of an encoder of sound.

catalog/towers.json has the encoder. vLLM keeps keys and values of the encoder's output in blocks of their own. Source:
vLLM's models/whisper.py.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.plan.model.config import CheckedConfig
from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Part, Weight

_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
}
"""The fields of all families by Whisper's names for its decoder. Its num_hidden_layers are the encoder's."""


def whisper_fields(config: CheckedConfig) -> None:
    """Write the decoder's sizes where all families have them. Positions are a table."""
    for name, own in _NAMES.items():
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
