"""The architectures the planner knows, by the name in a config's `architectures`.

Each family says which modules vLLM builds for a layer, and with which biases and norms; the names are the checkpoint's,
so that a quantisation's list of skipped modules can be matched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hpc_serve.errors import InvalidRequestError
from hpc_serve.plan.model import DecoderLayer, LayerCache, ModelSpec
from hpc_serve.plan.quantization import Quantization, plain_scheme, quantization_from_config
from hpc_serve.plan.weights import Block, Linear, Part, Vector, Vocabulary, Weight


class Reader:
    """The (text part of a) config with its defaults, and the weights every family shares."""

    def __init__(self, config: Mapping[str, Any], quantization: Quantization, dtype: str) -> None:
        self.config = config
        self.quantization = quantization
        self.dtype = dtype
        self.hidden_size: int = self.need("hidden_size")
        self.vocab_size: int = self.need("vocab_size")
        self.num_layers: int = self.need("num_hidden_layers")
        self.heads: int = self.need("num_attention_heads")
        self.kv_heads: int = self.get("num_key_value_heads") or self.heads
        self.head_dim: int = self.get("head_dim") or self.hidden_size // self.heads
        self.intermediate_size: int = self.get("intermediate_size") or 0

    def get(self, key: str, default: Any = None) -> Any:
        """A field, or `default` where it is missing or null."""
        value = self.config.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A field without which nothing can be said. Raises InvalidRequestError."""
        value = self.config.get(key)
        if value is None:
            raise InvalidRequestError(f"config.json has no {key!r}, without which its size is unknown.")
        return value

    def linear(
        self, name: str, inputs: Part | int, outputs: list[Part | int], split: Any = "none", *, bias: bool = False
    ) -> Linear:
        """A linear module, in the scheme the checkpoint gives it."""
        return Linear(
            name=name,
            inputs=inputs if isinstance(inputs, Part) else Part(inputs),
            outputs=tuple(part if isinstance(part, Part) else Part(part) for part in outputs),
            split=split,
            bias=bias,
            scheme=self.quantization.of(name),
        )

    def norm(self, name: str, size: int) -> Vector:
        """A norm's weights."""
        return Vector(name=name, size=size, element_bytes=4 if self.dtype == "float32" else 2)

    def attention(self, prefix: str, *, bias: bool = False, output_bias: bool = False) -> list[Weight]:
        """q, k, v fused, and the output projection, of grouped-query attention."""
        kv = Part(self.kv_heads, self.head_dim, replicate=True)
        heads = Part(self.heads, self.head_dim)
        return [
            self.linear(f"{prefix}.q_proj", self.hidden_size, [heads, kv, kv], "column", bias=bias),
            self.linear(f"{prefix}.o_proj", heads, [self.hidden_size], "row", bias=output_bias),
        ]

    def mlp(self, prefix: str, size: int, *, bias: bool = False) -> list[Weight]:
        """Gate and up fused, and down."""
        return [
            self.linear(f"{prefix}.gate_proj", self.hidden_size, [size, size], "column", bias=bias),
            self.linear(f"{prefix}.down_proj", size, [self.hidden_size], "row", bias=bias),
        ]

    def full_cache(self) -> LayerCache:
        """Keys and values of all tokens."""
        return LayerCache(kind="full", kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.head_dim)


Family: TypeAlias = Callable[[Reader, int], DecoderLayer]


def _llama(reader: Reader, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    bias = bool(reader.get("attention_bias", reader.get("bias", False)))
    weights = [
        *reader.attention(f"{prefix}.self_attn", bias=bias, output_bias=bias),
        *reader.mlp(f"{prefix}.mlp", reader.intermediate_size, bias=bool(reader.get("mlp_bias", False))),
        reader.norm("input_layernorm", reader.hidden_size),
        reader.norm("post_attention_layernorm", reader.hidden_size),
    ]
    return DecoderLayer(block=Block(weights=tuple(weights)), cache=reader.full_cache())


_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
}


def build(config: Mapping[str, Any], *, name: str, dtype: str, quantization: str | None) -> ModelSpec:
    """Read a config into a ModelSpec; see `model_from_config`."""
    architecture = (config.get("architectures") or ["(none named)"])[0]
    family = _FAMILIES.get(architecture)
    if family is None:
        raise InvalidRequestError(
            f"{name} is of architecture {architecture!r}, which this planner does not know; it knows "
            f"{', '.join(sorted(_FAMILIES))}."
        )
    declared = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    chosen = (declared if dtype == "auto" else dtype).removeprefix("torch.")
    if dtype == "auto" and chosen == "float32":
        chosen = "bfloat16"
    plain = plain_scheme(chosen)
    scheme = quantization_from_config(config.get("quantization_config"), plain=plain, override=quantization)
    reader = Reader(config, scheme, chosen)
    tied = bool(reader.get("tie_word_embeddings", False))
    head = Vocabulary(name="lm_head", rows=reader.vocab_size, width=reader.hidden_size, scheme=scheme.head)
    return ModelSpec(
        name=name,
        architecture=architecture,
        dtype=chosen,
        hidden_size=reader.hidden_size,
        vocab_size=reader.vocab_size,
        num_attention_heads=reader.heads,
        num_key_value_heads=reader.kv_heads,
        max_model_len=int(reader.get("max_position_embeddings", 2048)),
        quantization=scheme,
        embedding=Vocabulary(name="embed_tokens", rows=reader.vocab_size, width=reader.hidden_size, scheme=plain),
        layers=tuple(family(reader, index) for index in range(reader.num_layers)),
        final=Block(weights=(reader.norm("norm", reader.hidden_size),)),
        head=None if tied else head,
        intermediate_size=reader.intermediate_size,
    )
