"""The layers of EAGLE's draft heads, which read the hidden states of the model that they draft for.

Sources: vLLM's model_executor/models/llama_eagle.py and llama_eagle3.py.
"""

from __future__ import annotations

from hpc_serve.plan.model.layers import LayerBuilder, block
from hpc_serve.plan.model.spec import DecoderLayer
from hpc_serve.plan.model.weights import Part, Weight

_AUXILIARY_STATES = 3
"""Hidden states of inner layers that an EAGLE-3 head reads, where its config does not say how many."""


def eagle(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of the first EAGLE: Llama's layers. The first has no input norm and a matrix before it."""
    prefix, hidden = f"model.layers.{index}", builder.hidden_size
    names = ("post_attention_layernorm",) if index == 0 else ("input_layernorm", "post_attention_layernorm")
    joined: list[Weight] = [builder.linear("model.fc", 2 * hidden, [hidden])] if index == 0 else []
    weights = block(
        builder.attention(f"{prefix}.self_attn", bias=bool(builder.get("attention_bias", False))),
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bool(builder.get("mlp_bias", False))),
        builder.norms(*names),
        joined,
    )
    return DecoderLayer(block=weights, cache=builder.cache())


def eagle3(builder: LayerBuilder, index: int) -> DecoderLayer:
    """Build a layer of EAGLE-3: the first layer's attention reads embedding and hidden state side by side."""
    prefix, hidden = f"model.layers.{index}", builder.hidden_size
    key = Part(builder.kv_heads, builder.head_dim, replicate=True)
    query = Part(builder.heads, builder.head_dim)
    bias = bool(builder.get("attention_bias", False))
    joined: list[Weight] = []
    if index == 0:
        states = builder.get("num_aux_hidden_states", _AUXILIARY_STATES)
        joined = [builder.linear("model.fc", states * builder.get("target_hidden_size", hidden), [hidden])]
    weights = block(
        [
            builder.linear(
                f"{prefix}.self_attn.q_proj", hidden * (1 if index else 2), [query, key, key], "column", bias=bias
            ),
            builder.linear(f"{prefix}.self_attn.o_proj", query, [hidden], "row"),
        ],
        builder.mlp(f"{prefix}.mlp", builder.intermediate_size, bias=bool(builder.get("mlp_bias", False))),
        builder.norms("input_layernorm", "hidden_norm", "post_attention_layernorm"),
        joined,
    )
    return DecoderLayer(block=weights, cache=builder.cache())
