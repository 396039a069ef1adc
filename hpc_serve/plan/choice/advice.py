"""What a plan says beside its figures: the options with which a model fits, and what the figures leave out.

Each remedy is a set of options to type in place of those given: more nodes, fewer requests, a shorter context, a
smaller cache, or smaller weights. Each was tried: with these options a layout fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hpc_serve.errors import DoesNotFitError, InvalidRequestError
from hpc_serve.plan import catalog
from hpc_serve.plan.choice.candidates import CONTEXT_STEP, PlanInputs, longest_context
from hpc_serve.plan.choice.kernels import has_kernels, refusal
from hpc_serve.plan.choice.layout import Layout, layouts, layouts_on, without_layout
from hpc_serve.plan.engine import PINNED_VERSION, EngineConfig, max_num_batched_tokens
from hpc_serve.plan.hardware import chip_count, whole_cluster
from hpc_serve.plan.memory.kv_cache import kv_cache_dtype
from hpc_serve.plan.memory.loaded import is_left_out, is_text_only, kinds_read
from hpc_serve.plan.model.checkpoint import ON_CPUS
from hpc_serve.plan.model.scheme import FP8_TENSOR, Scheme, int_groups
from hpc_serve.plan.model.spec import Block, DecoderLayer, Linear, ModelSpec, Weight
from hpc_serve.units import number_of
from hpc_serve.vllm.arguments import is_known, nearest_version

_WITHOUT_DRAFT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


def plan_notes(model: ModelSpec, engine: EngineConfig, *, on_cpus: bool) -> Iterator[str]:
    """Yield a sentence for each field and each option that a figure leaves out, or counts only in part."""
    if model.unknown_keys:
        yield (
            f"Note: the config has {', '.join(model.unknown_keys)}, which this planner does not know. It is left out, "
            "at your own risk: the model may be of another size."
        )
    if engine.is_at_least(PINNED_VERSION) and not is_known(engine.vllm_version):
        yield (
            f"Note: hpc-serve has no data of vLLM {engine.vllm_version}: the plan and its options are those of "
            f"{nearest_version(engine.vllm_version)}, the nearest."
        )
    entry = catalog.find(model.name)
    if entry is not None and entry.min_vllm is not None and not engine.is_at_least(entry.min_vllm):
        yield (
            f"Note: {model.name} needs vLLM {entry.min_vllm} by vLLM's recipe, and this plan is for "
            f"{engine.vllm_version}: use a newer vLLM."
        )
    method, draft = engine.speculative_method, (engine.speculative_config or {}).get("model")
    if engine.speculates_with_own_layers:
        yield f"--speculative-config: {model.draft_layers} prediction layers with their cache are counted."
    elif engine.draft_model and model.draft_layers:
        yield (
            f"--speculative-config: weights and cache of the draft model {draft} are counted ({model.draft_layers} "
            "layers, on the last stage)."
        )
    elif method in _WITHOUT_DRAFT_WEIGHTS:
        yield f"--speculative-config: {method} loads no weights. The time to draft tokens is not counted."
    elif method is not None:
        named = f" {draft}" if draft else ""
        yield (
            f"Not counted: weights, cache and time of the draft model{named} (--speculative-config). Plan the draft "
            "model separately and leave its room with --gpu-memory-utilization."
        )
    if (engine.data_parallel_size or 1) > 1 and not engine.enable_expert_parallel:
        yield (
            "Without --enable-expert-parallel each data-parallel rank has a slice of every expert. vLLM's recipes for "
            "data parallelism have whole experts."
        )
    if engine.enable_lora:
        slots = f"{number_of(engine.lora_slots, 'slot')} of rank {engine.lora_rank}"
        yield f"LoRA: {slots} counted in the weights, and CUDA graphs twice. In the speed all requests use one."
        if on_cpus:
            yield ON_CPUS
    if engine.cpu_offload_gb:
        yield (
            f"--cpu-offload-gb {engine.cpu_offload_gb:g}: so many GiB of weights of each GPU stay in the node's "
            "memory, and each step reads them over PCIe (4.0 x16 is assumed). `submit` asks Slurm for that memory."
        )
    if engine.is_pooling:
        yield (
            "The model makes embeddings, scores or classes, and no text: neither an output head nor sampling is "
            "counted. The gateway's /v1/embeddings asks an embedder, /v1/score and /v1/rerank a reranker, /classify a "
            "classifier."
        )
    if model.encoder_positions:
        yield (
            f"The model transcribes audio. A request keeps {model.encoder_positions:,} positions of the encoder's "
            "output in the cache beside its tokens. vLLM counts a whole step of positions for each, so more requests "
            "run at once than it says. It turns chunked prefill and prefix caching off."
        )
    elif model.images and kinds_read(model) == ("audio",):
        yield (
            f"The model transcribes audio: 30 seconds are {model.images.image_tokens:,} tokens of a prompt. The speed "
            "is that of its decoder, without the encoder of sound."
        )
    if model.images and model.images.frame_pairs and not is_left_out("video", engine):
        yield (
            "vLLM profiles this tower with a video as long as the context. If no videos come, "
            "-- --limit-mm-per-prompt '{\"video\": 0}' leaves that memory to the cache."
        )
    if engine.limit_mm_per_prompt and model.images and not is_text_only(model, engine):
        yield (
            "--limit-mm-per-prompt: a step holds as many images as its tokens allow, whatever the limit. The tower is "
            "left out only where all its kinds of input are 0."
        )
    transfer, offloading = engine.kv_transfer_config, engine.kv_offloading_size
    for option, asked in (("--kv-transfer-config", transfer), ("--kv-offloading-size", offloading)):
        if asked:
            yield f"Not counted: buffers and copies of {option}, in GPU memory and in the table's speed."
    if engine.all2all_backend != EngineConfig.all2all_backend:
        yield f"--all2all-backend {engine.all2all_backend}: what it sends counts, the buffers that it keeps do not."
    if engine.uncounted:
        yield (
            f"Not counted: {', '.join(engine.uncounted)}. vLLM may need other memory with it, or be faster or slower; "
            "the figures are those without."
        )


_QUANTIZATIONS: tuple[tuple[str, str, Scheme], ...] = (
    ("fp8", "fp8 weights", FP8_TENSOR),
    ("gptq", "a checkpoint quantised to 4 bits", int_groups(4, 128, False)),
)
_LEAST_STEP = 512
"""Fewer tokens of a step are not proposed."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Options after which a layout fits, with their values, and a remark on the layout."""

    options: Mapping[str, str]
    gives: str = ""

    def as_checkpoint(self) -> Remedy:
        """Return the remedy in words, where --quantization stands for a checkpoint that no option gives."""
        rest = " ".join(word for pair in self.options.items() if pair[0] != "--quantization" for word in pair)
        return Remedy(options={}, gives=f"{self.gives}, with {rest}" if rest else self.gives)

    def __str__(self) -> str:
        words = " ".join(word for pair in self.options.items() for word in pair)
        if not words:
            return self.gives
        return f"{words} ({self.gives})" if self.gives else words


def suggestions(asked: PlanInputs, nearest: list[Layout]) -> list[Remedy]:
    """Return the remedies. Each alone is enough. Empty if none helps.

    `asked` has the machines of all replicas. `nearest` are layouts of one replica that miss least.
    """
    inputs = asked.for_one_replica()
    context, weights = _shorter_context(inputs, nearest), _smaller_weights(asked)
    tries = (
        _fewer_sequences(inputs, nearest),
        _smaller_steps(inputs, nearest),
        _more_nodes(asked) or _other_sizes(asked),
        _fewer_requests(inputs, nearest),
        context,
        _smaller_cache(inputs, nearest),
        weights,
        None if context or weights else _several_at_once(inputs, nearest),
    )
    return [remedy for remedy in tries if remedy]


def _several_at_once(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    """Return smaller weights with a shorter context.

    A smaller cache is added if the context would be too short without it.

    A context below a quarter of the one asked for is not worth a smaller cache or another checkpoint.
    """
    most = max((layout.num_nodes for layout in nearest), default=0)
    there = list(layouts_on(most, inputs.cluster, inputs.engine)) if most else []
    small = replace(inputs, engine=replace(inputs.engine, kv_cache_dtype="fp8"))
    for method, gives, scheme in _quantizations(inputs) if there else ():
        for tried, cache in ((inputs, {}), (small, {"--kv-cache-dtype": "fp8"})):
            if cache and not _takes_smaller_cache(inputs):
                continue
            found = replace(tried, model=_quantized(inputs.model, scheme))
            longest, layout = max(((longest_context(found, one), one) for one in there), key=lambda item: item[0])
            if longest >= max(CONTEXT_STEP, inputs.max_model_len // 4, inputs.workload.request_tokens or 1):
                options = {"--quantization": method, **cache, "--max-model-len": str(longest)}
                return Remedy(options=options, gives=f"{gives}: {layout.sizes()}")
    return None


def _fewer_sequences(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    """Return a smaller --max-num-seqs, for hybrids where more sequences than blocks were asked for."""
    if inputs.engine.max_num_seqs is None:
        return None
    free = replace(inputs, engine=replace(inputs.engine, max_num_seqs=None))
    for layout in nearest:
        candidate = free.evaluate(layout)
        if candidate.verdict == "fits" and candidate.memory is not None and candidate.memory.least_blocks:
            return Remedy(options={"--max-num-seqs": str(candidate.memory.max_num_seqs)})
    return None


def _smaller_steps(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    """Return the most tokens of a step with which a data-parallel layout fits: its experts see those of all ranks."""
    nearest = [layout for layout in nearest if layout.data_parallel_size > 1]
    tokens = max_num_batched_tokens(inputs.engine, inputs.cluster.accelerator, inputs.max_model_len)
    while nearest and (tokens := tokens // 2) >= _LEAST_STEP:
        small = replace(inputs, engine=replace(inputs.engine, max_num_batched_tokens=tokens))
        if any(map(small.fits, nearest)):
            return Remedy(options={"--max-num-batched-tokens": str(tokens)})
    return None


def _more_nodes(asked: PlanInputs) -> Remedy | None:
    """Return another number of nodes, or another slice if a slice was named."""
    cluster, replicas = asked.cluster, asked.workload.replicas or 1
    if cluster.is_whole:
        return _another_slice(asked)
    if not cluster.num_nodes and replicas == 1:
        return None
    one = replace(asked.workload, replicas=None)
    free = replace(asked, cluster=replace(cluster, num_nodes=None), workload=one)
    if (layout := _first_that_fits(free)) is None:
        return None
    size = layout.gpus_per_node if layout.num_nodes > 1 else free.cluster.node_size
    options = {"--nodes": str(layout.num_nodes * replicas), "--gpus-per-node": str(size)}
    return Remedy(options=options, gives=layout.sizes())


def _another_slice(asked: PlanInputs) -> Remedy | None:
    """Return the smallest slice on which a layout fits."""
    device = asked.cluster.accelerator
    for topology in device.slices:
        layout = _first_that_fits(replace(asked, cluster=whole_cluster(device, chip_count(topology))))
        if layout is not None:
            return Remedy(options={"--gpu": f"{device.name}:{topology}"}, gives=layout.sizes())
    return None


def _other_sizes(asked: PlanInputs) -> Remedy | None:
    """Return the sizes nearest to those asked for that fit, on as few nodes as possible."""
    engine = asked.engine
    tensor, pipeline = engine.tensor_parallel_size, engine.pipeline_parallel_size
    if not engine.has_asked_layout:
        return None
    free = replace(asked, engine=without_layout(engine))
    if (first := _first_that_fits(free)) is None:
        return None
    free = free.for_one_replica()

    def distance(layout: Layout) -> tuple[int, int, int]:
        off = abs(layout.tensor_parallel_size - tensor) if tensor else 0
        off += abs(layout.pipeline_parallel_size - pipeline) if pipeline else 0
        return off, -layout.tensor_parallel_size, layout.num_gpus

    there = layouts_on(first.num_nodes, free.cluster, free.engine)
    best = min(filter(free.fits, there), key=distance, default=first)
    options = {
        "--tensor-parallel-size": str(best.tensor_parallel_size),
        "--pipeline-parallel-size": str(best.pipeline_parallel_size),
    }
    if engine.data_parallel_size:
        options["--data-parallel-size"] = "1"
    return Remedy(options=options if asked.cluster.num_nodes else {**options, "--nodes": str(best.num_nodes)})


def _fewer_requests(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    if inputs.workload.concurrency == 1:
        return None
    most = 0
    for layout in nearest:
        memory = inputs.evaluate(layout).memory
        if memory is not None and memory.holds(1):
            most = max(most, memory.held(inputs.blocks_each(layout, memory)) * layout.data_parallel_size)
    return Remedy(options={"--concurrency": str(most)}, gives="requests of that length at once") if most else None


def _shorter_context(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    longest = max((longest_context(inputs, layout) for layout in nearest), default=0)
    if longest < max(CONTEXT_STEP, inputs.workload.request_tokens or 1):
        return None
    return Remedy(options={"--max-model-len": str(longest)})


def _smaller_cache(inputs: PlanInputs, nearest: list[Layout]) -> Remedy | None:
    if not _takes_smaller_cache(inputs):
        return None
    small = replace(inputs, engine=replace(inputs.engine, kv_cache_dtype="fp8"))
    return Remedy(options={"--kv-cache-dtype": "fp8"}) if any(map(small.fits, nearest)) else None


def _takes_smaller_cache(inputs: PlanInputs) -> bool:
    is_plain = kv_cache_dtype(inputs.model, inputs.engine) in ("bfloat16", "float16")
    small = replace(inputs.engine, kv_cache_dtype="fp8")
    return is_plain and refusal(inputs.model, small, inputs.cluster.accelerator) is None


def _smaller_weights(inputs: PlanInputs) -> Remedy | None:
    for method, gives, scheme in _quantizations(inputs):
        layout = _first_that_fits(replace(inputs, model=_quantized(inputs.model, scheme)))
        if layout is not None:
            return Remedy(options={"--quantization": method}, gives=f"{gives}: {layout.sizes()}")
    return None


def _quantizations(inputs: PlanInputs) -> list[tuple[str, str, Scheme]]:
    """Return the formats that the weights are not in yet. vLLM 0.32 has no fp8 kernels for CPUs and Volta."""
    device = inputs.cluster.accelerator
    has_fp8 = device.kind != "cpu" and has_kernels("fp8", device)
    free = inputs.model.quantization.method == "none"
    return [one for one in _QUANTIZATIONS if free and (has_fp8 or one[2] is not FP8_TENSOR)]


def _quantized(model: ModelSpec, scheme: Scheme) -> ModelSpec:
    """Return the model with the linear layers of its decoder in `scheme`.

    Routers, an indexer's weights, embeddings, head and norms stay in 16 bit, as quantizers leave them. vLLM keeps the
    matrix that expands a latent cache in 16 bit as well, once it is quantised.
    """

    def change(weight: Weight) -> Weight:
        if not isinstance(weight, Linear) or weight.name.endswith(("gate", "gate_proj", "weights_proj")):
            return weight
        return replace(weight, scheme=scheme)

    def changed(layer: DecoderLayer) -> DecoderLayer:
        kept = [weight for weight in layer.block.weights if weight.name.endswith("kv_b_proj")]
        weights = tuple(map(change, layer.block.weights))
        return replace(layer, block=Block(weights=weights), derived=Block(weights=(*layer.derived.weights, *kept)))

    return model.with_layers(changed)


def _first_that_fits(asked: PlanInputs) -> Layout | None:
    """Return the layout of one replica that a plan would choose."""
    try:
        inputs = asked.for_one_replica()
        return next(filter(inputs.fits, layouts(inputs.cluster, inputs.engine)), None)
    except (DoesNotFitError, InvalidRequestError):
        return None
