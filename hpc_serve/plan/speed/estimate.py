"""How fast a layout serves: time to the first token, time between tokens, tokens per second, and what limits them.

Every figure is given twice: ideally, which no engine can beat, and as expected of a real engine by `Factors`. step.py
decides how long a step takes, throughput.py how requests share steps. This module decides how many run at once.

It also names the classes of published runs that a plan belongs to. They do not change the estimate. Each class tells
how far its runs were from the speed that is printed for them; benchmarks/accuracy/speed_accuracy.py measures it
(plan/catalog/speed_accuracy.json).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.engine import LAYOUT_SIZES, EngineConfig
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.memory.kv_cache import cache_layout
from hpc_serve.plan.memory.overhead import graph_mode
from hpc_serve.plan.model.spec import Linear, ModelSpec, distinct_layers
from hpc_serve.plan.speed.measured import Case, Correction
from hpc_serve.plan.speed.step import EXPECTED, IDEAL, Factors, Roofline
from hpc_serve.plan.speed.throughput import Speed, Traffic, burst_speed, decode_speed, steady_speed

# -- classes of published runs

_MANY_EXPERTS = 64
"""With so many, each expert gets few tokens of a step, and its matrices are narrow on each rank."""
_MIXTURES = f"mixtures of {_MANY_EXPERTS} experts and more on GPUs"
OTHERS = "other models"
PIPELINE_STAGES = "engines with pipeline stages"
_OPTIONS = {
    one.name: one.default
    for one in fields(EngineConfig)
    if one.name not in LAYOUT_SIZES
    and one.name not in ("dtype", "quantization", "enforce_eager", "compilation_config", "optimization_level")
    and one.name not in ("gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "vllm_version")
}
"""Options with their defaults that make a case another one: not those of layout, format and graphs, which a case names,
and not those that only say how many requests run."""
_FORMATS = {"bfloat16": "16 bit", "float16": "16 bit", "fp8": "fp8 (per tensor)"}


def _weights_format(model: ModelSpec) -> str:
    """Return the format of most of a model's weights; of fp8 its kind too, because kernels differ by it."""
    counts: Counter[str] = Counter()
    for layer, layers in distinct_layers(model.layers):
        for weight in layer.block.weights:
            if isinstance(weight, Linear):
                counts[weight.scheme.name] += weight.parameters * layers
    name = counts.most_common(1)[0][0] if counts else model.dtype
    return _FORMATS.get(name, name)


def own_classes(roofline: Roofline) -> tuple[str, ...]:
    """Return the classes of this accelerator alone, the narrowest first.

    Empty for CPUs: only another engine was measured on them.

    Eager runs are classes of their own: no term has the host's work for each kernel that CUDA graphs spare.
    """
    model, accelerator = roofline.model, roofline.accelerator
    if accelerator.kind == "cpu":
        return ()
    kind, where = _kind_of(model), f"on {accelerator.name}"
    state = " without CUDA graphs" if _is_eager(roofline) else ""
    return (f"{kind} {where}{state}", f"{kind} {where}, with CUDA graphs or without", f"all models {where}{state}")


def _kind_of(model: ModelSpec) -> str:
    return f"{'mixtures of experts' if model.num_experts else 'dense models'} in {_weights_format(model)}"


def wide_classes(roofline: Roofline) -> tuple[str, ...]:
    """Return classes of several accelerators, each for a reason that work.py's counts do not have.

    A GPU without 4-bit arithmetic unpacks MXFP4 in its kernels (Marlin or Triton, by its generation), and how fast they
    are differs by both. Many experts are narrow grouped products with tiles that are partly empty. Data-parallel ranks
    wait for the one whose experts or requests are most. Batches in pipeline stages are not equally large. An engine
    without CUDA graphs starts each kernel from the host.
    """
    model, accelerator, found = roofline.model, roofline.accelerator, []
    if accelerator.kind == "gpu" and _weights_format(model) == "mxfp4" and "fp4" not in accelerator.dense_flops:
        found.append("mxfp4 on GPUs without 4-bit arithmetic")
    if accelerator.kind == "gpu" and model.num_experts >= _MANY_EXPERTS:
        found.append(_MIXTURES)
    if roofline.layout.data_parallel_size > 1:
        found.append("data-parallel ranks that share experts")
    if roofline.layout.pipeline_parallel_size > 1:
        found.append(PIPELINE_STAGES)
    if _is_eager(roofline):
        found.append("GPUs without CUDA graphs")
    return tuple(found)


def _is_eager(roofline: Roofline) -> bool:
    return graph_mode(roofline.engine) == "NONE" and roofline.accelerator.kind == "gpu"


def measured_classes(roofline: Roofline) -> dict[str, dict[str, Any]]:
    """Return the figures of a plan's classes by name: of its accelerator the narrowest with runs, and all wide ones."""
    found = speed_accuracy()["classes"]
    own = [name for name in own_classes(roofline) if name in found][:1]
    wide = [name for name in wide_classes(roofline) if name in found]
    return {name: found[name] for name in (*own, *wide)}


def speed_range(roofline: Roofline, traffic: Traffic) -> dict[str, Any] | None:
    """Return where at least 17 of 20 published sources were that had no part in the fit.

    `measured_by_printed` are the bounds, `sources` their number. None where too few were published.
    """
    found = speed_accuracy()[traffic.arrivals].get(roofline.accelerator.kind, {"ranges": {}})
    has_terms = traffic.decode_only or traffic.prefix_hits or roofline.engine.speculative_tokens
    ranges: dict[str, dict[str, Any]] = found["ranges"] if traffic.generates and not has_terms else {}
    return ranges.get(range_class(roofline))


def case_of(roofline: Roofline, traffic: Traffic, running: float) -> Case:
    """Return what a speed is of, to be compared with runs measured here. So many requests are `running` at once."""
    model, layout, engine = roofline.model, roofline.layout, roofline.engine
    return Case(
        accelerator=roofline.accelerator.name,
        numbers={
            "active_parameters": model.active_parameters,
            **{name: getattr(layout, name) for name in (*LAYOUT_SIZES, "num_nodes")},
            "input_tokens": traffic.input_tokens,
            "output_tokens": traffic.output_tokens,
            "running": running,
        },
        words={
            "model": model.name,
            "kind": _kind_of(model),
            "graphs": graph_mode(engine),
            "arrivals": "decoding alone" if traffic.decode_only else traffic.arrivals,
            "vllm": ".".join(map(str, engine.version)),
            **({"acceptance_length": f"{traffic.acceptance_length:g}"} if traffic.acceptance_length > 1 else {}),
            **{name: str(value) for name in _OPTIONS if (value := getattr(engine, name)) != _OPTIONS[name]},
        },
    )


def range_class(roofline: Roofline) -> str:
    """Return the class whose range is a plan's: runs with pipeline stages are slower, those of many experts differ."""
    wide = wide_classes(roofline)
    return next((name for name in (PIPELINE_STAGES, _MIXTURES) if name in wide), OTHERS)


def class_texts(roofline: Roofline) -> list[str]:
    """Return a sentence for each class, without its full stop: "Published runs of all models on v6e had 0.4 to 1.3
    times"."""
    return [f"Published runs of {name} had {_spread(figures)}" for name, figures in measured_classes(roofline).items()]


def _spread(figures: dict[str, Any]) -> str:
    low, high = figures["measured_by_printed"]
    first, third = figures["measured_by_printed_quartiles"]
    sources = f"{figures['sources']} source{'s' * (figures['sources'] > 1)}"
    return (
        f"{low:g} to {high:g} times these tokens/s ({figures['rows']} rows of {sources}; the middle half {first:g} to "
        f"{third:g})"
    )


# -- estimates


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """The speed of one replica under some traffic.

    At once, `batch` of the requests in flight run, and the others wait. The cache holds `capacity` of them. `is_ideal`:
    a person asked for the ideal figures alone. `measured` are runs here, by which `expected` and `factors` are
    corrected.
    """

    roofline: Roofline
    traffic: Traffic
    batch: float
    capacity: float
    ideal: Speed
    expected: Speed
    factors: Factors
    usd_per_gpu_hour: float | None = None
    is_ideal: bool = False
    measured: Correction | None = None

    @property
    def speed(self) -> Speed:
        """The figures that are asked for: the expected ones, or the ideal ones."""
        return self.ideal if self.is_ideal else self.expected

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return self.roofline.layout.num_gpus

    @property
    def output_tokens_per_s_per_gpu(self) -> float:
        """Output tokens per second of each GPU."""
        return self.speed.output_tokens_per_s / self.num_gpus

    @property
    def output_tokens_per_usd(self) -> float | None:
        """Output tokens for a dollar. None without a price."""
        if not self.usd_per_gpu_hour:
            return None
        return self.output_tokens_per_s_per_gpu * 3600 / self.usd_per_gpu_hour


@dataclass(frozen=True, kw_only=True)
class ReplicaSpeeds:
    """The speeds of one replica for any number of requests in flight, whose lengths and arrivals are `traffic`'s.

    `memory` is that of the layout. `is_ideal`: a person asked for the ideal figures alone.
    """

    roofline: Roofline
    traffic: Traffic
    memory: MemoryEstimate
    usd_per_gpu_hour: float | None = None
    is_ideal: bool = False

    def at(self, concurrency: int, factors: Factors = EXPECTED) -> SpeedEstimate:
        """Return the speed with so many requests in flight.

        Requests that the cache or vLLM's max_num_seqs cannot hold wait. The requests in flight are divided among the
        data-parallel ranks. Ranks step together, so a step is that of the fullest one.
        """
        roofline, traffic = self.roofline, replace(self.traffic, concurrency=concurrency)
        capacity = requests_held(roofline, traffic, self.memory)
        batch = running_requests(roofline, traffic, capacity)
        measured = _correction(roofline, traffic, batch)
        if measured is not None:
            factors = factors.times(measured.ratio)
        return SpeedEstimate(
            roofline=roofline,
            traffic=traffic,
            batch=batch,
            capacity=roofline.layout.data_parallel_size * capacity,
            ideal=speed_column(roofline, traffic, batch, IDEAL),
            expected=speed_column(roofline, traffic, batch, factors),
            factors=factors,
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            is_ideal=self.is_ideal,
            measured=measured,
        )

    def held(self) -> int:
        """Return the most requests of the traffic's mean length that run at once: by the cache, and by max_num_seqs."""
        roofline = self.roofline
        of_rank = min(requests_held(roofline, self.traffic, self.memory), roofline.max_num_seqs)
        return max(1, int(roofline.layout.data_parallel_size * of_rank))

    def for_table(self) -> list[SpeedEstimate]:
        """Return the speeds for one request in flight, powers of four, the number asked for, and as many as are
        held."""
        held = self.held()
        counts = {1, held, *(size for size in (4, 16, 64, 256) if size < held)}
        if self.traffic.concurrency > 1:
            counts.add(self.traffic.concurrency)
        return [self.at(count) for count in sorted(counts)]


def _correction(roofline: Roofline, traffic: Traffic, batch: float) -> Correction | None:
    """Return what runs that were measured here say of a speed. None if there are no such runs."""
    if roofline.measured is None or not roofline.measured.runs:
        return None
    published = speed_range(roofline, traffic)
    return roofline.measured.correction(
        case_of(roofline, traffic, batch), published["measured_by_printed"] if published else None
    )


def requests_held(roofline: Roofline, traffic: Traffic, memory: MemoryEstimate) -> float:
    """Return how many requests of the traffic's mean length the cache of one data-parallel rank holds at once."""
    engine = roofline.engine
    ranks = roofline.layout.tensor_parallel_size
    layout = cache_layout(roofline.model, engine, ranks, kind=roofline.accelerator.kind)
    length = math.ceil(traffic.mean_context)
    blocks = layout.blocks_per_request(length, roofline.max_num_batched_tokens)
    return max(0, memory.num_blocks - 1) / blocks if blocks else math.inf


def running_requests(roofline: Roofline, traffic: Traffic, capacity: float) -> float:
    """Return how many of the requests in flight run at once: as many as the ranks' caches hold and max_num_seqs allows.

    `capacity` is that of one data-parallel rank.
    """
    of_rank = max(1.0, min(capacity, roofline.max_num_seqs))
    return min(float(traffic.concurrency), roofline.layout.data_parallel_size * of_rank)


def speed_column(roofline: Roofline, traffic: Traffic, batch: float, factors: Factors) -> Speed:
    """Return one column of an estimate, by the formula for the arrival of requests. `batch` of them can run.

    The requests are divided among the data-parallel ranks. Ranks step together, so a step is that of the fullest one.
    """
    ranks = roofline.layout.data_parallel_size
    each = replace(traffic, concurrency=-(-traffic.concurrency // ranks))
    fullest = float(each.concurrency) if batch >= traffic.concurrency else batch / ranks
    arrives_at_once = traffic.arrivals == "burst"
    formula = decode_speed if traffic.decode_only else burst_speed if arrives_at_once else steady_speed
    speed = formula(roofline, each, fullest, factors)
    share = batch / fullest
    rate, tokens_per_s = share * speed.requests_per_s, share * speed.output_tokens_per_s
    return replace(speed, requests_per_s=rate, output_tokens_per_s=tokens_per_s)
