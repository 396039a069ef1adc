"""The parts of a model: every weight as vLLM lays it out, and every layer's cache.

A weight says which parts tensor parallelism divides, which it copies, and which it pads; its bytes follow from its
scheme (quantization.py) and the layout. architectures.py builds a `ModelSpec` from a Hugging Face config. memory/
decides what it takes on each GPU of a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan.model.quantization import Quantization
from hpc_serve.plan.model.scheme import BF16, Scheme

_VOCAB_PADDING = 64
"""Rows to which vLLM rounds a vocabulary (DEFAULT_VOCAB_PADDING_SIZE in vocab_parallel_embedding.py)."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`.

    >>> round_up(151_669, 64)
    151680
    """
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Part:
    """Features in `units` that stay on one rank, each `width` wide.

    `replicate`: where there are more ranks than units, several ranks hold the same unit (KV heads). `align`: a rank's
    share is padded to a multiple of this, for kernels that work on tiles.
    """

    units: int
    width: int = 1
    replicate: bool = False
    align: int = 1

    @property
    def size(self) -> int:
        """Features in all."""
        return self.units * self.width

    def per_rank(self, ranks: int, name: str) -> int:
        """Return the features on each of `ranks` ranks. Raises DoesNotFitError if vLLM refuses to divide them."""
        if self.units % ranks == 0:
            return round_up(self.units // ranks * self.width, self.align)
        if self.replicate and ranks % self.units == 0:
            return round_up(self.width, self.align)
        what = f"{self.units} units of {self.width}" if self.width > 1 else f"{self.units} features"
        raise DoesNotFitError(f"{name} has {what}, which {ranks} ranks do not divide")


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A matrix, or several fused ones that share their input: `outputs` of q, k and v, or of gate and up.

    `split`: "column" divides the outputs among the ranks. "row" divides the inputs, and each rank holds the whole bias.
    "none" copies the matrix to each rank. `copies` is the number of matrices in one tensor: more than one for experts,
    which expert parallelism divides instead.
    """

    name: str
    inputs: Part
    outputs: tuple[Part, ...]
    split: Literal["column", "row", "none"] = "none"
    bias: bool = False
    copies: int = 1
    is_expert: bool = False
    scheme: Scheme = BF16

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint, without scales."""
        rows = sum(part.size for part in self.outputs)
        return self.copies * rows * (self.inputs.size + self.bias)

    def shard(self, ranks: int) -> tuple[list[int], int]:
        """Return (output features of each fused part, input features) on one rank."""
        column = ranks if self.split == "column" else 1
        row = ranks if self.split == "row" else 1
        outputs = [part.per_rank(column, self.name) for part in self.outputs]
        return outputs, self.inputs.per_rank(row, self.name)

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank. `expert_ranks` above 1 divides whole experts instead of their matrices."""
        copies = self.copies
        if self.is_expert and expert_ranks > 1:
            copies, ranks = -(-self.copies // expert_ranks), 1
        outputs, inputs = self.shard(ranks)
        if ranks > 1 and self.split != "none":
            cut = outputs if self.split == "column" else [inputs]
            self.scheme.check_cut(cut, is_output=self.split == "column", name=self.name)
        return copies * self.scheme.linear_bytes(outputs, inputs, bias=self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """An embedding table or output head. vLLM pads its rows and then divides them."""

    name: str
    rows: int
    width: int
    scheme: Scheme = BF16

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return self.rows * self.width

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank."""
        rows = Part(round_up(self.rows, _VOCAB_PADDING)).per_rank(ranks, f"the padded vocabulary of {self.name}")
        return self.scheme.linear_bytes([rows], self.width, bias=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vector:
    """Norms, sinks, convolutions, positions: never quantised. `split`: ranks divide it as they divide the heads.

    `units`: it has so many equal units, and where there are more ranks than units, several ranks hold the same unit.
    """

    name: str
    size: int
    split: bool = False
    element_bytes: int = 2
    units: int = 0

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return self.size

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one rank."""
        part = Part(self.units, self.size // self.units, replicate=True) if self.units else Part(self.size)
        return self.element_bytes * part.per_rank(ranks if self.split else 1, self.name)


Weight: TypeAlias = Linear | Vocabulary | Vector


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Weights that stay on one pipeline stage together: a decoder layer, a vision tower, the final norm."""

    weights: tuple[Weight, ...] = ()

    @property
    def experts(self) -> tuple[Linear, ...]:
        """The matrices of routed experts."""
        return tuple(weight for weight in self.weights if isinstance(weight, Linear) and weight.is_expert)

    @property
    def parameters(self) -> int:
        """Elements in the checkpoint."""
        return sum(weight.parameters for weight in self.weights)

    def bytes_per_rank(self, ranks: int, expert_ranks: int = 1) -> int:
        """Return the bytes on one tensor-parallel rank."""
        return sum(weight.bytes_per_rank(ranks, expert_ranks) for weight in self.weights)


CacheKind = Literal["full", "sliding", "chunked", "mla", "state", "compressed", "encoder", "cross"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTensor:
    """One of several cache tensors of a layer with a compressed cache. Its blocks have a size of their own.

    A block has `block_tokens` tokens, and an entry of `entry_bytes` for each `tokens_per_entry` of them. A page is
    rounded up to `align` bytes. If there is a `window`, only the last tokens are kept. `is_attended`: attention reads
    its entries. Other tensors are an indexer's keys, or tokens that are not compressed yet.
    """

    name: str
    block_tokens: int
    entry_bytes: int
    tokens_per_entry: int = 1
    window: int = 0
    align: int = 1
    is_attended: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return round_up(self.block_tokens // self.tokens_per_entry * self.entry_bytes, self.align)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """The cache of one layer for a request.

    "full" keeps all tokens, "sliding" the last `window` tokens, "chunked" the current chunk of `window` tokens. Each of
    these keeps `kv_heads` x (`head_dim` + `value_dim`) elements per token, and tensor parallelism divides the heads.
    "mla" keeps `head_dim` elements per token (latent and rotary) on every rank. If an indexer chooses the tokens, it
    keeps `index_bytes` bytes per token beside them and takes `index_flops` for each token of the context. A token then
    attends to `chosen_tokens` of them (0: to all). "full" may have such an indexer too. "state" keeps `state` alone:
    tensors of fixed size. "full" with a `state` keeps both. "compressed" keeps `tensors` on every rank, and each tensor
    has its own blocks. "encoder" keeps nothing: its tokens attend in both directions, all at once. "full" with
    `encoder_positions` keeps as much of each position of an encoder's output, however many tokens there are: "cross".
    """

    kind: CacheKind
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int = 0
    index_bytes: int = 0
    index_flops: int = 0
    chosen_tokens: int = 0
    state: tuple[tuple[int, int], ...] = ()
    """(elements over all ranks, bytes of an element) of each state tensor. 0 bytes: the model's type."""
    state_groups: Part | None = None
    """Elements of the first state tensor by group: ranks beyond the groups hold copies."""
    tensors: tuple[CacheTensor, ...] = ()
    encoder_positions: int = 0

    @property
    def parts(self) -> tuple[LayerCache, ...]:
        """The caches that vLLM counts one by one: a layer with attention and a state side by side has two."""
        if self.kind == "full" and self.encoder_positions:
            return replace(self, encoder_positions=0), replace(self, kind="cross")
        if self.kind == "state" or not self.state:
            return (self,)
        state = LayerCache(kind="state", state=self.state, state_groups=self.state_groups)
        return replace(self, state=(), state_groups=None), state

    def state_bytes(self, ranks: int, dtype_bytes: int) -> int:
        """Return the bytes of the state tensors on one rank. Raises DoesNotFitError if ranks do not divide them."""
        total = dtype_bytes * self.state_groups.per_rank(ranks, "a layer's state") if self.state_groups else 0
        for elements, element_bytes in self.state:
            if elements % ranks:
                raise DoesNotFitError(f"{ranks} ranks do not divide a layer's state of {elements} elements")
            total += elements // ranks * (element_bytes or dtype_bytes)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """One decoder layer. `derived` is not in the checkpoint: vLLM computes it from the weights when it loads them."""

    block: Block
    cache: LayerCache | None
    derived: Block = field(default_factory=Block)


def distinct_layers(layers: Sequence[DecoderLayer]) -> list[tuple[DecoderLayer, int]]:
    """Return each layer once, with the number of layers like it: layers alike are one object."""
    counts = Counter(map(id, layers))
    return [(layer, counts[key]) for key, layer in {id(layer): layer for layer in layers}.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEncoder:
    """The memory that images take while vLLM profiles.

    `image_tokens` is the most tokens that one image becomes; each token is made from `patches_per_token` patches. At
    the peak of the tower a patch needs `patch_elements` elements on every rank and `split_patch_elements` divided among
    the ranks. `output_rows` are rows of output per token: more than one if inner layers feed the decoder too. A video
    is profiled with as many pairs of frames as the context holds, at most `frame_pairs`, each of `image_tokens`; 0: no
    video is larger than an image. vLLM 0.11 keeps `kept_tokens_0_11` for the largest video.
    """

    image_tokens: int
    patches_per_token: int
    patch_elements: int
    split_patch_elements: int
    output_rows: int = 1
    frame_pairs: int = 0
    kept_tokens_0_11: int = 0

    def largest_video(self, max_model_len: int) -> int:
        """Return the tokens of the largest video: `get_num_frames_with_most_features` in vLLM's models/qwen2_vl.py.

        >>> qwen = ImageEncoder(
        ...     image_tokens=16384, patches_per_token=4, patch_elements=1, split_patch_elements=1, frame_pairs=7
        ... )
        >>> qwen.largest_video(32768), qwen.largest_video(131072)
        (32768, 114688)
        """
        pairs = min(self.frame_pairs, max(1, max_model_len // self.image_tokens))
        return pairs * self.image_tokens

    def __post_init__(self) -> None:
        if self.image_tokens < 1:
            raise InvalidRequestError(
                f"By the config's vision_config the largest image becomes {self.image_tokens} tokens: an image must be "
                "larger than a patch of it (image_size, patch_size)."
            )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it. Sizes are in elements.

    `dtype` is torch's name of the type without quantization, and `dtype_asked` says that a person asked for it by name.
    `max_model_len` is the longest context the config allows, which is vLLM's default. `head` is None if the output head
    is the embedding. Each pipeline stage holds `tower` (that of images, which `images` describes, and of sound) and
    `beside`, which is neither tower nor layer. Some models in vLLM ignore the stage, so each stage also holds the parts
    in `on_every_stage`: of "embedding", "final" and "head". vLLM does not divide a model that `is_one_stage`.
    `has_whole_shared_experts`: each rank has them whole if data, tensor and expert parallelism come together.
    `rotary_bytes` is the table of sines and cosines on each rank. `prediction_layers` are the checkpoint's layers for
    multi-token prediction, which vLLM loads only to speculate. When it loads them, they are the last `draft_layers` of
    `layers`. `stored_wide`: the files hold 32-bit floats, which are loaded in 16 bit. `unknown_keys` are fields of the
    config that look like a size and were left out at the person's own risk. `engine_options` are those with which vLLM
    serves the model, by EngineConfig's names.
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
    tower: Block = field(default_factory=Block)
    beside: Block = field(default_factory=Block)
    is_one_stage: bool = False
    on_every_stage: frozenset[str] = frozenset()
    has_whole_shared_experts: bool = False
    intermediate_size: int = 0
    rotary_bytes: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    images: ImageEncoder | None = None
    prediction_layers: int = 0
    draft_layers: int = 0
    stored_wide: bool = False
    unknown_keys: tuple[str, ...] = ()
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def with_layers(self, change: Callable[[DecoderLayer], DecoderLayer]) -> ModelSpec:
        """Return the same model with each decoder layer changed. Layers that are one object stay one object."""
        changed = {id(layer): change(layer) for layer, _ in distinct_layers(self.layers)}
        return replace(self, layers=tuple(changed[id(layer)] for layer in self.layers))

    def with_weights(self, change: Callable[[tuple[Weight, ...]], tuple[Weight, ...]]) -> ModelSpec:
        """Return the same model with the weights of each decoder layer changed."""
        return self.with_layers(lambda layer: replace(layer, block=Block(weights=change(layer.block.weights))))

    @cached_property
    def everywhere(self) -> Block:
        """What each pipeline stage holds beside its layers."""
        return Block(weights=(*self.tower.weights, *self.beside.weights))

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an activation element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def _parts(self) -> list[Block | Vocabulary]:
        """All weights, those of each layer as one."""
        parts: list[Block | Vocabulary] = [self.embedding, *(layer.block for layer in self.layers), self.final]
        return [*parts, self.everywhere] if self.head is None else [*parts, self.everywhere, self.head]

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights. Tied weights count once, scales do not count."""
        return sum(part.parameters for part in self._parts)

    @cached_property
    def prediction_layer_parameters(self) -> int:
        """Elements of a layer for multi-token prediction: a last layer, a projection of two inputs, and three norms.

        Files may hold a copy of embedding and head with it (GLM-4.5's do).
        """
        return self.layers[-1].block.parameters + 2 * self.hidden_size**2 + 3 * self.hidden_size

    @cached_property
    def active_parameters(self) -> int:
        """Elements that one token uses. Of the routed experts, only the chosen ones count."""
        if not self.num_experts:
            return self.parameters
        return self.parameters - sum(
            count * (weight.parameters - weight.parameters * self.num_experts_per_tok // weight.copies)
            for layer, count in distinct_layers(self.layers)
            for weight in layer.block.experts
        )

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights with their scales, on one rank that holds everything."""
        return sum(part.bytes_per_rank(1) for part in self._parts)

    @cached_property
    def has_states(self) -> bool:
        """Whether some layers keep a state of fixed size, as hybrid models do."""
        return any(layer.cache and layer.cache.state for layer in self.layers)

    @cached_property
    def is_encoder(self) -> bool:
        """Whether the model reads whole texts at once, in both directions, and caches nothing."""
        return all(layer.cache and layer.cache.kind == "encoder" for layer in self.layers)

    @cached_property
    def encoder_positions(self) -> int:
        """Positions of an encoder's output to which the decoder attends, of each request. 0: it has no encoder."""
        return max((layer.cache.encoder_positions for layer in self.layers if layer.cache), default=0)

    @cached_property
    def is_mla(self) -> bool:
        """Whether the cache is a latent that every rank holds as a whole."""
        return any(layer.cache and layer.cache.kind in ("mla", "compressed") for layer in self.layers)
