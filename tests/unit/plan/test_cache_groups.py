"""The groups of the KV cache, and what they hold, against vLLM's own functions over random mixes of layers.

vLLM's layers describe their own caches here, and its platform chooses the size of a block. Only heads, types and memory
are made up.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan import EngineConfig, ModelSpec, model_from_config, resolve
from hpc_serve.plan.engine import default_block_size
from hpc_serve.plan.hardware import AcceleratorKind
from hpc_serve.plan.memory.kv_cache import CacheLayout, cache_layout
from hpc_serve.plan.model.spec import Block, DecoderLayer, LayerCache

pytest.importorskip("vllm", reason="the groups are compared with vLLM's own functions")

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, get_kv_cache_spec_kind
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

LLAMA = model_from_config(resolve("8b").config, name="8b")
TARGET_DTYPE = torch.bfloat16
IN_FLIGHT_TOKENS = 4096


class LatentBackend(TritonAttentionBackend):
    """Stands in for a GPU's backend of latent attention, which the CPU build cannot import."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [64]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 64 == 0


def attention(kind: str, window: int = 0) -> st.SearchStrategy[LayerCache]:
    widths = st.tuples(st.sampled_from([64, 96, 128, 256, 512]), st.sampled_from([64, 128, 192]), st.booleans())
    return st.builds(
        lambda heads, of: LayerCache(
            kind=kind,  # type: ignore[arg-type]
            kv_heads=heads,
            head_dim=of[0],
            value_dim=of[1] if of[2] and kind != "chunked" else of[0],
            window=window,
        ),
        st.sampled_from([1, 2, 4, 8, 16]),
        widths,
    )


latent = st.sampled_from([320, 512, 576]).map(lambda size: LayerCache(kind="mla", kv_heads=1, head_dim=size))
windows = st.sampled_from([128, 512, 1000, 1024, 4096])
plain = st.one_of(
    attention("full"),
    windows.flatmap(lambda window: attention("sliding", window)),
    windows.flatmap(lambda window: attention("chunked", window)),
)
states = st.lists(
    st.tuples(st.sampled_from([24_576, 98_304, 524_288, 1_000_000]), st.sampled_from([2, 4])), min_size=1, max_size=2
).map(lambda state: LayerCache(kind="state", state=tuple(state)))


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[LayerCache], list[LayerCache]]:
    """The caches of a model's layers, of up to three kinds and hybrids among them, and of layers that draft."""
    kind = draw(st.sampled_from(["plain", "latent", "hybrid", "latent hybrid", "both in a layer"]))
    is_plain = kind == "plain"
    first = draw(latent if kind.startswith("latent") else plain if is_plain else attention("full"))
    if not is_plain:
        first = replace(first, value_dim=first.head_dim if first.kind == "full" else 0)
        state = draw(states)
        others = st.one_of(states, st.just(replace(first, kind="sliding", window=512)) if kind == "hybrid" else states)
        both = [replace(first, state=state.state)] if kind == "both in a layer" else [first, state]
        kinds = [*both, *draw(st.lists(st.just(first) if len(both) == 1 else others, max_size=1))]
    else:
        kinds = [first, *draw(st.lists(plain, max_size=2))]
    pattern = draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=30))
    return [*kinds, *pattern], draw(st.lists(plain, max_size=2))


def model_of(layers: list[LayerCache], drafts: list[LayerCache]) -> ModelSpec:
    made = tuple(DecoderLayer(block=Block(), cache=cache) for cache in (*layers, *drafts))
    return replace(LLAMA, layers=made, draft_layers=len(drafts), dtype="bfloat16")


@st.composite
def engines(draw: st.DrawFn) -> EngineConfig:
    drafted = draw(st.integers(min_value=0, max_value=4))
    return EngineConfig(
        block_size=draw(st.sampled_from([None, None, 64, 128])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8", "int8_per_token_head"])),
        enable_prefix_caching=draw(st.booleans()),
        speculative_config={"method": "mtp", "num_speculative_tokens": drafted} if drafted else None,
    )


class Vllm:
    """vLLM's view of the same model: its configuration, and what each layer says of its cache."""

    def __init__(self, model: ModelSpec, engine: EngineConfig, ranks: int, kind: AcceleratorKind) -> None:
        self.model, self.ranks = model, ranks
        self.dtype = engine.kv_cache_dtype
        cpu = kind == "cpu"
        self.plain = CPUAttentionBackend if cpu else TritonAttentionBackend
        drafted = engine.speculative_tokens
        several = drafted > 1 and model.draft_layers > 1
        self.config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=0, original_max_model_len=0, dtype=TARGET_DTYPE, use_mla=model.is_mla, architecture="",
                get_num_kv_heads=lambda _: self.heads(self.widest), get_head_size=lambda: self.widest.head_dim,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks, decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            attention_config=SimpleNamespace(hisparse_config=None),
            device_config=SimpleNamespace(device_type=kind),
            speculative_config=None,
            num_speculative_tokens=drafted,
            num_prefill_lookahead_tokens=drafted if several else 1 if drafted else 0,
            max_in_flight_tokens=IN_FLIGHT_TOKENS,
            cache_config=SimpleNamespace(
                block_size=engine.block_size or default_block_size(engine, kind, is_mla=model.is_mla),
                cache_dtype=self.dtype, num_gpu_blocks_override=None, prefix_cache_retention_interval=None,
                mamba_cache_mode="align" if engine.enable_prefix_caching else "none", use_replayssm=False,
                mamba_block_size=1, mamba_page_size_padded=None, skip_page_size_padded=None,
                kv_cache_dtype_skip_layers=[],
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC if cpu else KVCacheLayout.LBNHC,
            ),
        )  # fmt: skip

    @property
    def widest(self) -> LayerCache:
        """The target's attention, by which a hybrid's blocks are chosen: all of one hybrid here is alike."""
        return next(part for _, part in self.parts(range(len(self.model.layers))) if part.kind != "state")

    def parts(self, layers: range) -> list[tuple[str, LayerCache]]:
        """The caches of these layers, each with a name that begins with its layer's number."""
        caches = [(index, self.model.layers[index].cache) for index in layers]
        return [(f"{index}.{number}", part) for index, cache in caches for number, part in enumerate(cache.parts)]

    def heads(self, cache: LayerCache) -> int:
        return max(1, cache.kv_heads // self.ranks)

    def align_to_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        specs = [self.spec(part) for _, part in self.parts(range(len(self.model.layers))) if part.kind == "state"]
        of_model = SimpleNamespace(get_mamba_specs_from_config=lambda _: specs)
        monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (of_model, ""))
        backend = self.backend(self.widest)
        monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda cls, _: [backend]))
        Platform._align_hybrid_block_size(self.config, backend)

    def backend(self, cache: LayerCache) -> type[AttentionBackend]:
        return LatentBackend if cache.kind == "mla" else self.plain

    def spec(self, cache: LayerCache) -> KVCacheSpec:
        layer: Any = SimpleNamespace(
            attn_type=AttentionType.DECODER, attn_backend=self.backend(cache), kv_cache_dtype=self.dtype,
            kv_cache_torch_dtype=STR_DTYPE_TO_TORCH_DTYPE.get(self.dtype, TARGET_DTYPE),
            num_kv_heads=self.heads(cache), head_size=cache.head_dim, head_size_v=cache.value_dim,
            sliding_window=cache.window if cache.kind == "sliding" else None, attention_chunk_size=cache.window,
            get_state_shape=lambda: tuple((elements // self.ranks,) for elements, _ in cache.state),
            get_state_dtype=lambda: tuple({2: torch.bfloat16, 4: torch.float32}[size] for _, size in cache.state),
            mamba_type="", is_kv_cache_tp_replicated=False, indexer=None, non_causal_multi_token_decode=False,
        )  # fmt: skip
        if cache.kind == "state":
            return MambaBase.get_kv_cache_spec(layer, self.config)
        of = {"mla": MLAAttention, "chunked": ChunkedLocalAttention}.get(cache.kind, Attention)
        return customize_attention_spec(self.backend(cache), of.get_kv_cache_spec(layer, self.config))

    def caches(self, stages: list[range], memory: int, max_model_len: int) -> list[KVCacheConfig]:
        """The caches of all workers. Raises ValueError where vLLM has no room, NotImplementedError for the mix."""
        self.config.model_config.max_model_len = self.config.model_config.original_max_model_len = max_model_len
        specs = [{name: self.spec(part) for name, part in self.parts(stage)} for stage in stages]
        return kv_cache_utils.get_kv_cache_configs(self.config, specs, [memory] * len(stages))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    mix=mixes(),
    engine=engines(),
    ranks=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(["gpu", "gpu", "cpu"]),
    cut=st.floats(min_value=0, max_value=0.9),
    memory=st.integers(min_value=2**26, max_value=2**38),
    max_model_len=st.integers(min_value=1, max_value=200_000),
)
def test_groups_are_vllms_own(mix, engine, ranks, kind, cut, memory, max_model_len):
    model = model_of(*mix)
    has_scales = engine.kv_cache_dtype == "int8_per_token_head"
    assume(not (kind == "cpu" and (model.is_mla or has_scales)) and not (model.is_mla and has_scales))
    vllm = Vllm(model, engine, ranks, kind)
    count = len(model.layers)
    middle = int(cut * count)
    stages = [range(middle), range(middle, count)] if middle else [range(count)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if model.has_states:
            vllm.align_to_states(monkeypatch)
    try:
        layout = cache_layout(model, engine, ranks, kind=kind)
    except DoesNotFitError:
        with pytest.raises(NotImplementedError, match="page size is not divisible"):
            vllm.caches(stages, memory, max_model_len)
        return
    blocks = min(memory // layout.bytes_per_block(stage.start, stage.stop) for stage in stages)
    needed = layout.blocks_per_request(max_model_len, IN_FLIGHT_TOKENS)
    if blocks < 1 + needed:
        with pytest.raises(ValueError, match=r"KV cache is needed|No available memory") as refused:
            vllm.caches(stages, memory, max_model_len)
        longest = re.search(r"estimated maximum model length is (\d+)", str(refused.value))
        assert longest is None or middle or fits_just(layout, blocks, int(longest[1]))  # vLLM's first stage that lacks
        return
    caches = vllm.caches(stages, memory, max_model_len)
    assert [cache.num_blocks for cache in caches] == [blocks] * len(stages)
    assert by_layers(layout) == [
        (
            sorted(int(name.split(".")[0]) for cache in caches for name in cache.kv_cache_groups[index].layer_names),
            tokens_of(group),
        )
        for index, group in enumerate(caches[0].kv_cache_groups)
    ]
    whole = kv_cache_utils.generate_scheduler_kv_cache_config(caches)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(vllm.config, whole)
    assert (tokens, concurrency) == (int(blocks / needed * max_model_len), blocks / needed)


def fits_just(layout: CacheLayout, blocks: int, max_model_len: int) -> bool:
    """Whether a request of so many tokens fits beside vLLM's own block, and one of a token more does not."""
    here, next_one = (layout.blocks_per_request(max_model_len + more, IN_FLIGHT_TOKENS) for more in (0, 1))
    return 1 + here <= blocks < 1 + next_one


def by_layers(layout: CacheLayout) -> list[tuple[list[int], int]]:
    return [(sorted(group.layers), 0 if group.kind == "state" else group.block_size) for group in layout.groups]


def tokens_of(group: KVCacheGroupSpec) -> int:
    """Tokens of a group's block. 0 for states, whose block size is of no account."""
    return 0 if get_kv_cache_spec_kind(group.kv_cache_spec) == "mamba" else group.kv_cache_spec.block_size
