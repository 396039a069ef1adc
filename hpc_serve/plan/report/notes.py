"""The sentences of a plan on what its figures leave out, or count only in part. memory/loaded.py counts the rest."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_serve.plan import catalog
from hpc_serve.plan.engine import PINNED_VERSION, EngineConfig
from hpc_serve.plan.memory.loaded import is_left_out, is_text_only, kinds_read
from hpc_serve.plan.model.checkpoint import ON_CPUS
from hpc_serve.plan.model.spec import ModelSpec
from hpc_serve.vllm.options import is_known, nearest_version

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
        yield (f"--speculative-config: {model.draft_layers} prediction layers with their cache are counted.")
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
        slots = f"{engine.lora_slots} slot{'s' if engine.lora_slots > 1 else ''} of rank {engine.lora_rank}"
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
    for option, asked in (
        ("--kv-transfer-config", engine.kv_transfer_config),
        ("--kv-offloading-size", engine.kv_offloading_size),
    ):
        if asked:
            yield f"Not counted: buffers and copies of {option}, in GPU memory and in the table's speed."
    if engine.all2all_backend != EngineConfig.all2all_backend:
        yield f"--all2all-backend {engine.all2all_backend}: what it sends counts, the buffers that it keeps do not."
    if engine.uncounted:
        yield (
            f"Not counted: {', '.join(engine.uncounted)}. vLLM may need other memory with it, or be faster or slower; "
            "the figures are those without."
        )
