"""The layers of EAGLE's draft heads, which read the hidden states of the model that they draft for.

Sources: vLLM's model_executor/models/llama_eagle.py and llama_eagle3.py.
"""

from __future__ import annotations

from hpc_serve.plan.model.layers import LayerBuilder, decoder_layer
from hpc_serve.plan.model.spec import DecoderLayer

_AUXILIARY_STATES = 3
"""Hidden states of inner layers that an EAGLE-3 head reads, where its config does not say how many."""


def eagle(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of the first EAGLE: Llama's layers. The first has no input norm and a matrix before it."""
    norms = ("post_attention_layernorm",) if builder.index == 0 else ("input_layernorm", "post_attention_layernorm")
    return _layer(builder, norms, joined=2 * builder.hidden_size)


def eagle3(builder: LayerBuilder) -> DecoderLayer:
    """Build a layer of EAGLE-3: the first layer's attention reads embedding and hidden state side by side."""
    hidden = builder.hidden_size
    joined = builder.get("num_aux_hidden_states", _AUXILIARY_STATES) * builder.get("target_hidden_size", hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return _layer(builder, norms, joined=joined, inputs=hidden if builder.index else 2 * hidden)


def _layer(builder: LayerBuilder, norms: tuple[str, ...], *, joined: int, inputs: int | None = None) -> DecoderLayer:
    """Return Llama's layer with these norms. Before the first is a matrix of so many `joined` features."""
    return decoder_layer(
        builder.cache(),
        builder.attention("self_attn", bias=builder.flag("attention_bias"), inputs=inputs),
        builder.mlp("mlp", builder.intermediate_size, bias=builder.flag("mlp_bias")),
        builder.norms(*norms),
        [] if builder.index else [builder.outside.linear("model.fc", joined, [builder.hidden_size])],
    )
