"""What a model is made of, read from its Hugging Face config: every weight, and what each layer caches.

`ModelSpec` is the value the rest of the planner works on; `model_from_config` chooses the family (families*.py) that
knows an architecture. How the parts are laid over GPUs, and what they take there, is for memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from hpc_serve.plan.model.quantization import Quantization
from hpc_serve.plan.model.weights import Block, Linear, Vocabulary, Weight

CacheKind = Literal["full", "sliding", "chunked", "mla", "state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """What one layer keeps of a request.

    "full", "sliding" (the last `window` tokens) and "chunked" (the current chunk of `window`): `kv_heads` times
    (`head_dim` + `value_dim`) elements a token, heads divided by tensor parallelism. "mla": `head_dim` elements a token
    (latent and rotary), on every rank. "state": `state_elements` of given bytes, whatever the length.
    """

    kind: CacheKind
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    state: tuple[tuple[int, int], ...] = ()
    """(elements in all ranks, bytes an element; 0 = the model's type) of each state tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """One layer of a pipeline stage. `derived` is not in the checkpoint: vLLM makes it from the weights on loading."""

    block: Block
    cache: LayerCache | None
    derived: Block = field(default_factory=Block)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEncoder:
    """What images take while vLLM profiles: the most tokens one image becomes, patches behind each token, elements a
    patch needs at the peak of the tower (whole, and divided by tensor parallelism), and rows of output for a token
    (more than one where inner layers feed the decoder too)."""

    image_tokens: int
    patches_per_token: int
    patch_elements: int
    split_patch_elements: int
    output_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it. Sizes in elements; `dtype` is torch's name of the 16-bit (or 32-bit) type, which
    was asked for by name where `dtype_asked`.

    `max_model_len` is the longest context the config allows (vLLM's default). `head` is None where the output head is
    the embedding. `everywhere` is held by each pipeline stage (the vision tower, which `images` is about), as are those
    of "embedding", "final" and "head" that `on_every_stage` names (some of vLLM's models do not look at the stage).
    `rotary_bytes` is the table of sines and cosines that each rank keeps.
    """

    name: str
    architecture: str
    dtype: str
    dtype_asked: bool
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    max_model_len: int
    quantization: Quantization
    embedding: Vocabulary
    layers: tuple[DecoderLayer, ...]
    final: Block
    head: Vocabulary | None
    everywhere: Block = field(default_factory=Block)
    on_every_stage: frozenset[str] = frozenset()
    intermediate_size: int = 0
    rotary_bytes: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    images: ImageEncoder | None = None

    def with_weights(self, change: Callable[[tuple[Weight, ...]], tuple[Weight, ...]]) -> ModelSpec:
        """The same model with the weights of each decoder layer changed. Layers that are one object stay one object."""
        changed: dict[int, DecoderLayer] = {}
        for layer in self.layers:
            if id(layer) not in changed:
                changed[id(layer)] = replace(layer, block=Block(weights=change(layer.block.weights)))
        return replace(self, layers=tuple(changed[id(layer)] for layer in self.layers))

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an activation element."""
        return 4 if self.dtype == "float32" else 2

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights, tied ones once, scales not counted."""
        head = self.head.parameters if self.head else 0
        layers = sum(layer.block.parameters for layer in self.layers)
        return self.embedding.parameters + layers + self.final.parameters + head + self.everywhere.parameters

    @cached_property
    def active_parameters(self) -> int:
        """Elements a token passes through: of the routed experts only those chosen for it."""
        if not self.num_experts:
            return self.parameters
        idle = 0
        for layer in self.layers:
            for weight in layer.block.weights:
                if isinstance(weight, Linear) and weight.is_expert:
                    idle += weight.parameters - weight.parameters * self.num_experts_per_tok // weight.copies
        return self.parameters - idle

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights on one rank that holds everything, scales included."""
        head = self.head.bytes_per_rank(1) if self.head else 0
        layers = sum(layer.block.bytes_per_rank(1) for layer in self.layers)
        ends = self.embedding.bytes_per_rank(1) + self.final.bytes_per_rank(1)
        return ends + layers + head + self.everywhere.bytes_per_rank(1)

    @cached_property
    def has_states(self) -> bool:
        """Whether some layers keep a state of fixed size (a hybrid)."""
        return any(layer.cache is not None and layer.cache.kind == "state" for layer in self.layers)

    @cached_property
    def is_mla(self) -> bool:
        """Whether the cache is a latent that every rank holds whole."""
        return any(layer.cache is not None and layer.cache.kind == "mla" for layer in self.layers)
