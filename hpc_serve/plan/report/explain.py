"""The lines of --explain: every number of a plan with its calculation, every factor with its name.

`explain` has the memory of the tightest GPU, `explain_lines` one step's time, ideal beside expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hpc_serve.plan.choice.candidates import MinimumGpus, PlanInputs
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.engine import gpu_memory_utilization, max_num_seqs
from hpc_serve.plan.memory import overhead
from hpc_serve.plan.memory.estimate import MemoryEstimate, profile_runs
from hpc_serve.plan.memory.kv_cache import full_context_bytes, kv_cache_dtype
from hpc_serve.plan.memory.loaded import PipelineStage, kinds_read
from hpc_serve.plan.memory.overhead import ProfileRun
from hpc_serve.plan.report.speed import lengths_text, measured_text
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.plan.speed.step import FITTED, IDEAL, limit_lines
from hpc_serve.plan.speed.throughput import read_prompts
from hpc_serve.units import GIB, MIB

# -- speed

_MEANING = {
    "flops": "of a large product's FLOP/s, in dense matrices",
    "expert_flops": "of a large product's FLOP/s, in routed experts",
    "attention_flops": "of a large product's FLOP/s, in attention",
    "bandwidth": "of the memory bandwidth",
    "link": "of the links between GPUs",
    "collective_s": "for each all-reduce or hop, whatever its size",
    "kernel_s": "for each kernel, whatever its size; half of it with async scheduling",
    "sequence_s": "of the engine's own for each sequence of a step",
    "request_s": "of the server's own for each request of a burst",
}


def explain_lines(estimate: SpeedEstimate) -> Iterator[str]:
    """Yield the step of one estimate, ideal beside expected, and the factors between the two."""
    roofline, traffic, ideal, expected = estimate.roofline, estimate.traffic, estimate.ideal, estimate.expected
    work = roofline.work.stages
    word = "decoding alone" if traffic.decode_only else f"{traffic.arrivals} arrivals"
    yield (
        f"Speed of one replica, {traffic.concurrency} requests in flight {lengths_text(traffic)} ({word}, "
        f"{estimate.batch:.0f} run, the cache holds {estimate.capacity:.0f}):"
    )
    yield f"  {'':34}{'ideal':>12}{'expected':>12}"
    read = sum(stage.weight_bytes(estimate.batch / len(work)) for stage in work)
    causes = [
        ("weights_s", f"weights, {read / 1e9:.1f} GB a {roofline.accelerator.unit}"),
        ("flops_s", "FLOP/s"),
        ("cache_s", f"KV cache, {traffic.mean_context:,.0f} tokens each"),
        ("communication_s", "communication"),
        ("engine_s", f"engine, {sum(stage.kernels for stage in work):,} kernels"),
    ]
    if len(work) > 1:
        causes.append(("bubble_s", "waiting for the slowest stage"))
    for key, text in causes:
        yield f"  {text:34}{_ms(getattr(ideal.step, key))}{_ms(getattr(expected.step, key))}"
    each = "a token" if traffic.acceptance_length == 1 else f"{traffic.acceptance_length:.3g} tokens"
    yield f"  {f'= one step, {each} for each':34}{_ms(ideal.step.total_s)}{_ms(expected.step.total_s)}"
    between = "time between tokens" if traffic.decode_only else "time between tokens, with prompts"
    yield f"  {between:34}{_ms(ideal.tpot_s)}{_ms(expected.tpot_s)}"
    yield f"  {'time to the first token':34}{_ms(ideal.ttft_s)}{_ms(expected.ttft_s)}"
    yield f"  {'output tokens/s':34}{ideal.output_tokens_per_s:12,.0f}{expected.output_tokens_per_s:12,.0f}"
    yield from _cost_lines(estimate)
    yield from _separate_lines(estimate)
    shares = sorted(estimate.speed.causes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in shares if share >= 0.005)
    time = "the ideal time" if estimate.is_ideal else "the time"
    prompts = "" if traffic.decode_only else ", prompts included"
    yield f"  Of all {time}{prompts}: {parts}. The bound is {estimate.speed.bound}."
    reached = f"a large product has {100 * roofline.accelerator.matmul_share:.0f} % of the FLOP/s"
    yield f"  Ideal: every rate at its peak, communication hidden. Expected, where {reached}:"
    for name, meaning in _MEANING.items():
        value = getattr(estimate.factors, name)
        shown = f"{1e6 * value:.0f} µs" if name.endswith("_s") else f"{100 * value:.0f} %"
        origin = "fitted on published measurements" if name in FITTED else "assumed"
        hidden = ", behind the device's" if name == "sequence_s" and roofline.async_scheduling else ""
        yield f"    {shown:>8} {meaning}{hidden} ({origin})"
    if (whence := measured_text([estimate])) is not None:
        yield f"  All of these factors count what was {whence}."
    for line in limit_lines(roofline):
        yield f"  {line}"


def _cost_lines(estimate: SpeedEstimate) -> Iterator[str]:
    """Yield dollars for a million output tokens: by the price that a person gave, else by a list price with its
    date."""
    accelerator, usd = estimate.roofline.accelerator, estimate.usd_per_gpu_hour
    listed = accelerator.list_price
    if usd:
        origin = "as --usd-per-gpu-hour says"
    elif listed:
        usd = listed.usd_per_hour
        origin = f"{listed.source}, {listed.date}; --usd-per-gpu-hour says another"
    else:
        return
    ideal, expected = (
        usd * estimate.num_gpus / (3600 * speed.output_tokens_per_s) * 1e6
        for speed in (estimate.ideal, estimate.expected)
    )
    yield f"  {'$ for a million output tokens':34}{ideal:12,.3f}{expected:12,.3f}"
    yield f"    at ${usd:,.2f} for an hour of a {accelerator.unit} ({origin})"


def _separate_lines(estimate: SpeedEstimate) -> Iterator[str]:
    """Yield lines on decoding alone, with prompts read on other replicas, and the number of those replicas.

    A prompt alone takes p seconds. A replica that decodes ends batch / (output steps x step) requests a second. So p
    times as many replicas of the same layout read prompts for it (How To Scale Your Model, part 8).
    """
    traffic = estimate.traffic
    rates, prefills, shares = [], [], []
    for factors, speed in ((IDEAL, estimate.ideal), (estimate.factors, estimate.expected)):
        prefills.append(read_prompts(estimate.roofline, traffic, 1, factors).seconds)
        rates.append(estimate.batch * traffic.acceptance_length / speed.step.total_s)
        shares.append(prefills[-1] * rates[-1] / traffic.output_tokens)
    if not traffic.decode_only:
        yield f"  {'output tokens/s, decoding alone':34}{rates[0]:12,.0f}{rates[1]:12,.0f}"
    yield f"  {'a prompt alone':34}{_ms(prefills[0])}{_ms(prefills[1])}"
    yield f"  {'replicas for prompts, each decoding':34}{shares[0]:11.2f} {shares[1]:11.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9,.2f} ms" if seconds < 10 else f"{seconds:10,.2f} s"


# -- memory

_ROUND_CONTEXT = 128_000


def explain(
    inputs: PlanInputs, layout: Layout, memory: MemoryEstimate, minimum: MinimumGpus, *, note: str | None = None
) -> list[str]:
    """Return lines of text: the model, its cache, the fewest GPUs for it, and the tightest GPU of the layout."""
    engine = replace(inputs.engine_for(layout), max_num_seqs=memory.max_num_seqs)
    sizes = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size
    runs = profile_runs(inputs.model, inputs.cluster.accelerator, engine, sizes, inputs.max_model_len)
    run = runs[memory.pipeline_rank]
    return [
        *_model_lines(inputs),
        *([f"  note: {note}"] if note else []),
        "",
        *_minimum_lines(inputs, minimum),
        "",
        f"Tightest GPU of {layout}: " + _stage_name(run.stage, layout),
        *_budget_lines(inputs, memory, run),
        "",
        *_cache_lines(inputs, memory),
    ]


def _model_lines(inputs: PlanInputs) -> Iterator[str]:
    model, engine = inputs.model, inputs.engine
    yield f"{model.name} ({model.architecture}, {model.dtype})"
    yield f"  embedding    {model.vocab_size:>12,} x {model.hidden_size:,} = {model.embedding.parameters:,}"
    for layer, count in Counter(layer.block.parameters for layer in model.layers).items():
        yield f"  layers       {count:>12,} x {layer:,} = {count * layer:,}"
    if model.head is not None:
        yield f"  output head  {model.vocab_size:>12,} x {model.hidden_size:,} = {model.head.parameters:,}"
    elif not engine.is_pooling:
        yield "  output head  the embedding itself (tied)"
    tower = "encoder of sound" if kinds_read(model) == ("audio",) else "vision tower and projector"
    for what, part in ((tower, model.tower), ("beside the layers", model.beside)):
        if part.parameters:
            yield f"  {what} {part.parameters:,}"
    if model.prediction_layers:
        layer = model.prediction_layer_parameters
        why = "layers for multi-token prediction, which vLLM loads to speculate"
        yield f"  not loaded   {model.prediction_layers:>12,} x {layer:,} ({why})"
    active = f", a token passes {model.active_parameters:,} of them" if model.num_experts else ""
    yield f"  parameters   {model.parameters:,}{active}"
    scheme = "" if model.quantization.method == "none" else f", {model.quantization.linear.name} or experts in it"
    if model.quantization.experts is not model.quantization.linear:
        scheme = f", experts in {model.quantization.experts.name}"
    yield f"  weights      {model.weight_bytes:,} bytes = {model.weight_bytes / 1e9:.1f} GB{scheme}"
    if model.is_encoder:
        return
    dtype = kv_cache_dtype(model, engine)
    token = full_context_bytes(model, engine, 2) - full_context_bytes(model, engine, 1)
    yield f"  KV cache     {token:,} bytes a token in {dtype}, over all layers and ranks"
    lengths = [inputs.max_model_len]
    if _ROUND_CONTEXT < inputs.max_model_len <= 131072:
        lengths.insert(0, _ROUND_CONTEXT)
    for length in lengths:
        size = full_context_bytes(model, engine, length)
        yield f"               {length:,} tokens: {size / GIB:.2f} GiB"


def _minimum_lines(inputs: PlanInputs, minimum: MinimumGpus) -> Iterator[str]:
    gpu, model = inputs.cluster.accelerator, inputs.model
    label, weights = gpu.label_bytes, model.weight_bytes
    both = weights + full_context_bytes(model, inputs.engine, inputs.max_model_len)
    yield f"Fewest {gpu.name}, by the label of {label / 1e9:.0f} GB:"
    rows = ("weights alone", weights, minimum.weights), ("with one long request", both, minimum.full_context)
    for text, size, count in rows:
        yield f"  {text:22} {size / 1e9:.1f} / {label / 1e9:.0f} = {size / label:.2f} -> {count}"
    if minimum.usable:
        yield f"  vLLM can start on      {minimum.usable} (driver's memory x utilisation, less the overheads below)"


def _stage_name(stage: PipelineStage, layout: Layout) -> str:
    if layout.pipeline_parallel_size == 1:
        return "all are alike"
    layers = f"layers {stage.first_layer}-{stage.end_layer - 1}"
    return f"stage {stage.rank + 1} of {layout.pipeline_parallel_size}, {layers}"


def _budget_lines(inputs: PlanInputs, memory: MemoryEstimate, run: ProfileRun) -> Iterator[str]:
    total, cache = f"{memory.total_bytes / GIB:.2f} GiB that the driver shows", "KV cache"
    if inputs.engine.kv_cache_memory_bytes:
        total, cache = f"of {total}", "KV cache, as --kv-cache-memory-bytes says"
    else:
        total += f" x {gpu_memory_utilization(inputs.engine):g} (gpu_memory_utilization)"
    yield _line("", memory.requested_bytes, total)
    yield _line("-", memory.weight_bytes, "weights")
    loading = memory.model_loading_bytes - memory.weight_bytes
    yield _line("-", loading, "loading: rotary table, derived matrices, LoRA slots, padding, the allocator's rounding")
    yield _line("-", memory.activation_bytes, "activation peak: " + _activation_text(run))
    sign = " " if memory.graphs_outside else "-"
    outside = ", outside the budget" if memory.graphs_outside else ""
    yield _line(sign, memory.cuda_graph_bytes, f"CUDA graphs: {_graph_text(run)}{outside}")
    yield _line("-", memory.non_torch_bytes, "non-torch: " + _non_torch_text(run))
    yield _line("=", memory.kv_cache_bytes, cache if memory.blocks_per_request else "unused")


def _activation_text(run: ProfileRun) -> str:
    """Say which of images, forward pass and sampling is the largest, with its calculation."""
    forward, sampling = overhead.forward_bytes(run), overhead.sampling_bytes(run) if run.stage.is_last else 0
    encoder, _ = overhead.image_bytes(run)
    if run.model.images and encoder > max(forward, sampling):
        return f"{overhead.visual_tokens(run):,} tokens of images, or of a video, through the vision tower"
    if forward >= sampling:
        return (
            f"a step of {run.tokens:,} tokens x {overhead.elements_per_token(run):,} elements "
            f"({overhead.HIDDEN_COPIES} x hidden, and the widest layer)"
        )
    copies, _ = overhead.logits_copies(run)
    sequences = min(max_num_seqs(run.engine, run.accelerator), run.tokens)
    return f"sampling {sequences:,} sequences x {run.model.vocab_size:,} logits x {copies:g} copies of 4 bytes"


def _graph_text(run: ProfileRun) -> str:
    graphs = overhead.graph_count(run)
    if not graphs:
        return "none"
    layers = sum(count for _, count in run.distinct_layers)
    each = overhead.cuda_graph_bytes(run) / graphs / max(1, layers) / MIB
    return f"{graphs} graphs x {layers} layers x {each:.2f} MiB"


def _non_torch_text(run: ProfileRun) -> str:
    context, nccl = overhead.context_bytes(run) / GIB, overhead.nccl_bytes(run) / GIB
    return f"{context:.2f} GiB of context and kernels" + (f", {nccl:.2f} of NCCL" if nccl else "")


def _cache_lines(inputs: PlanInputs, memory: MemoryEstimate) -> Iterator[str]:
    if inputs.model.is_encoder:
        yield "An encoder reads whole texts and caches nothing."
        return
    yield f"One token takes {memory.kv_bytes_per_token:,} bytes there; a block holds {memory.block_size} tokens."
    yield f"  {memory.kv_cache_bytes:,} / {memory.bytes_per_block:,} bytes a block = {memory.num_blocks:,} blocks"
    yield (
        f"  a request of {inputs.max_model_len:,} tokens takes {memory.blocks_per_request:,} blocks: "
        f"{memory.max_concurrency:.2f} at once ({memory.kv_cache_tokens:,} tokens)"
    )


def _line(sign: str, size: int, text: str) -> str:
    return f"  {sign:1} {size / GIB:7.2f} GiB  {text}"
