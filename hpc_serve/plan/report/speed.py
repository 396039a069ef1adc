"""A plan's speed for people and programs: estimates for a table, lines of --explain, keys of --json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.hardware.accelerator import AcceleratorKind
from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.speed.classes import OTHERS, range_class, speed_range
from hpc_serve.plan.speed.decode import critical_batch
from hpc_serve.plan.speed.estimate import SpeedEstimate, estimate_speed, held_at_once, speed_column
from hpc_serve.plan.speed.limits import limit_lines
from hpc_serve.plan.speed.step import EXPECTED, FITTED, IDEAL, Roofline, StepTime
from hpc_serve.plan.speed.traffic import Speed, Traffic

_WORTH_WHILE = 0.5
_SPEED_KEYS = ("ttft_s", "queue_s", "tpot_s", "requests_per_s", "output_tokens_per_s")
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


def estimates_by_concurrency(
    roofline: Roofline,
    traffic: Traffic,
    memory: MemoryEstimate,
    *,
    usd_per_gpu_hour: float | None = None,
    is_ideal: bool = False,
) -> list[SpeedEstimate]:
    """Return estimates for one request in flight, powers of four, the number asked for, and as many as are held."""
    held = held_at_once(roofline, traffic, memory)
    counts = {1, held, *(size for size in (4, 16, 64, 256) if size < held)}
    if traffic.concurrency > 1:
        counts.add(traffic.concurrency)
    return [
        estimate_speed(
            roofline,
            replace(traffic, concurrency=count),
            memory,
            usd_per_gpu_hour=usd_per_gpu_hour,
            is_ideal=is_ideal,
        )
        for count in sorted(counts)
    ]


def formula_text(traffic: Traffic) -> str:
    """Say in words how requests arrive."""
    if traffic.decode_only:
        return "decoding alone: prompts are read elsewhere and take no time"
    if traffic.arrivals == "steady":
        return "steady arrivals: so many are always in flight"
    longest = traffic.longest_output_tokens
    lengths = f"answers of at most {longest:,} tokens" if longest else "answers of one length"
    return f"in a burst: all arrive at once, {lengths}"


def requests_text(traffic: Traffic) -> str:
    """Say in words how long requests are."""
    if not traffic.generates:
        return f"texts of {traffic.input_tokens:,} tokens"
    return f"requests {_lengths(traffic)}"


def _lengths(traffic: Traffic) -> str:
    hits = f", {100 * traffic.prefix_hits:.0f} % of them cached," if traffic.prefix_hits else ""
    return f"of {traffic.input_tokens:,} tokens in{hits} and {traffic.output_tokens:,} out"


def time_of(estimate: SpeedEstimate) -> float:
    """Return the seconds that a table shows: between tokens, or for a whole text if the model generates none.

    Where so many texts are always in flight, a text takes as long as all of them take to be read (Little's law).
    """
    speed, traffic = estimate.speed, estimate.traffic
    if traffic.generates:
        return speed.tpot_s
    return speed.ttft_s if traffic.arrivals == "burst" else traffic.concurrency / speed.requests_per_s


def arrivals_text(traffic: Traffic) -> str:
    """Say in words how requests arrive, and name the option for the other way."""
    others = {"steady": "; --requests N: N at once", "burst": "; --arrivals steady: so many are always in flight"}
    return formula_text(traffic) + ("" if traffic.decode_only else others[traffic.arrivals])


def accuracy_text(traffic: Traffic, kind: AcceleratorKind) -> str:
    """Say in words how near such figures are to published measurements."""
    if traffic.decode_only:
        return "no published measurement is of decoding alone"
    if not traffic.generates:
        return "no published measurement is of models that generate no text"
    found = speed_accuracy()[traffic.arrivals].get(kind)
    arrivals = "steady arrivals" if traffic.arrivals == "steady" else "bursts"
    if kind == "cpu":
        low = f": {found['rows']} measurements, of another engine, are a fifth to a half lower" if found else ""
        return f"fitted on GPUs and TPUs, on no CPU{low}"
    if found is None:
        return f"no published measurement is of {arrivals} on such accelerators"
    text = (
        f"tokens/s of {found['sources']} published sources of {arrivals}{' on TPUs' * (kind == 'tpu')}, each left out "
        f"of the fit, are off by {found['median_error_per_cent']:.0f} % in the median"
    )
    if "ttft_rows" in found:
        low, high = found["measured_by_printed_ttft_quartiles"]
        start = ", start included," if traffic.arrivals == "steady" else ""
        text += f"; mean TTFT of half of {found['ttft_rows']} runs{start} was {low:g} to {high:g} times as long"
    return text


def measured_text(estimates: Sequence[SpeedEstimate]) -> str | None:
    """Say by how many runs here the expected figures are corrected, and how. None if they are not."""
    found = [one.measured for one in estimates if one.measured is not None]
    if not found:
        return None
    runs, ratios = max(one.runs for one in found), sorted({f"{one.ratio:.2g}" for one in found}, key=float)
    times = ratios[0] if len(ratios) == 1 else f"{ratios[0]} to {ratios[-1]}"
    some = "" if len(found) == len(estimates) else f", for {len(found)} of these {len(estimates)} figures"
    return f"measured here on {runs} run{'s' if runs > 1 else ''}: × {times}{some}"


def range_of(roofline: Roofline, estimate: SpeedEstimate) -> tuple[float, float] | None:
    """Return the range of an expected speed, in multiples of it: 17 of 20 measurements are there."""
    if estimate.measured is not None:
        return estimate.measured.bounds
    found = speed_range(roofline, estimate.traffic)
    return None if found is None else tuple(found["measured_by_printed"])


def range_text(roofline: Roofline, estimates: Sequence[SpeedEstimate]) -> str | None:
    """Say whence the range is, and by which runs here figures are corrected. None if there is neither."""
    whence, found = measured_text(estimates), speed_range(roofline, estimates[0].traffic)
    if whence is not None:
        ranges = [one.measured.bounds for one in estimates if one.measured is not None]
        low, high = min(ranges, key=lambda bounds: bounds[1] / bounds[0])
        return f"The figures count what was {whence}. The narrowest range is {low:.2f} to {high:.2f} times the figure."
    if found is None:
        return None
    low, high = found["measured_by_printed"]
    whose = "" if (name := range_class(roofline)) == OTHERS else f" on {name}"
    return (
        f"The range is {low:g} to {high:g} times the figure. Of {found['sources']} published sources{whose}, each left "
        f"out of the fit, {found['sources_in_bounds_of_others']} were within the range of the others."
    )


def waiting_text(estimate: SpeedEstimate) -> str | None:
    """Return a sentence on requests that wait. None where all run at once."""
    traffic, running = estimate.traffic, int(estimate.batch)
    if running >= traffic.concurrency:
        return None
    wait_s = estimate.speed.queue_s
    return (
        f"{running:,} of {traffic.concurrency:,} requests run at once, and the others wait. TTFT includes the wait, "
        f"{wait_s:,.1f} s on average."
    )


def start_text(roofline: Roofline, estimate: SpeedEstimate) -> str | None:
    """Say how long the first requests of a run wait, which arrive at once. None if none arrive so, or all do."""
    traffic = estimate.traffic
    if traffic.arrivals != "steady" or traffic.decode_only or traffic.concurrency == 1:
        return None
    factors = IDEAL if estimate.is_ideal else estimate.factors
    first = speed_column(roofline, replace(traffic, arrivals="burst"), estimate.batch, factors)
    return (
        f"At the start of a run, where {traffic.concurrency:,} arrive at once, their TTFT is {first.ttft_s:,.1f} s on "
        "average."
    )


def knee_text(roofline: Roofline, traffic: Traffic, memory: MemoryEstimate, *, is_ideal: bool = False) -> str:
    """Say up to which number of requests in flight more of them pay.

    The number is the first power of two from which twice as many requests give less than half as many tokens/s more.
    """
    held = held_at_once(roofline, traffic, memory)

    def at(count: int) -> Speed:
        return estimate_speed(roofline, replace(traffic, concurrency=count), memory, is_ideal=is_ideal).speed

    count, here = 1, at(1)
    while 2 * count <= held:
        twice = at(2 * count)
        gain = twice.output_tokens_per_s / here.output_tokens_per_s - 1
        if gain < _WORTH_WHILE:
            return (
                f"The knee is at about {count:,} in flight: twice as many give {100 * gain:.0f} % more tokens/s, "
                f"with {1000 * twice.tpot_s:,.1f} ms between tokens where it was {1000 * here.tpot_s:,.1f}."
            )
        count, here = 2 * count, twice
    return f"No knee: tokens/s still grow well at the {held:,} requests that are held at once."


def critical_text(roofline: Roofline, traffic: Traffic, memory: MemoryEstimate) -> str:
    """Return the batch from which FLOP/s take longer than reading weights, beside what is held."""
    batch = critical_batch(roofline)
    if batch is None:
        return "No critical batch: reading the weights takes longer than the FLOP/s at any batch."
    held = held_at_once(roofline, traffic, memory)
    text = f"The critical batch is {batch:,}: from there on FLOP/s take longer than reading the weights, both ideal."
    return f"{text} {held:,} are held at once" + (", so it is never reached." if held < batch else ".")


def explain_lines(roofline: Roofline, estimate: SpeedEstimate) -> Iterator[str]:
    """Yield the step of one estimate, ideal beside expected, and the factors between the two."""
    traffic, ideal, expected = estimate.traffic, estimate.ideal, estimate.expected
    work = roofline.work.stages
    word = "decoding alone" if traffic.decode_only else f"{traffic.arrivals} arrivals"
    yield (
        f"Speed of one replica, {traffic.concurrency} requests in flight {_lengths(traffic)} ("
        f"{word}, {estimate.batch:.0f} run, the cache holds "
        f"{estimate.capacity:.0f}):"
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
    yield from _cost_lines(roofline, estimate)
    yield from _separate_lines(roofline, estimate)
    shares = sorted(estimate.speed.causes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in shares if share >= 0.005)
    time = "the ideal time" if estimate.is_ideal else "the time"
    prompts = "" if traffic.decode_only else ", prompts included"
    yield f"  Of all {time}{prompts}: {parts}. The bound is {estimate.bound}."
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


def _cost_lines(roofline: Roofline, estimate: SpeedEstimate) -> Iterator[str]:
    """Yield dollars for a million output tokens: by the price that a person gave, else by a list price with its
    date."""
    listed, usd, unit = roofline.accelerator.list_price, estimate.usd_per_gpu_hour, roofline.accelerator.unit
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
    yield f"    at ${usd:,.2f} for an hour of a {unit} ({origin})"


def _separate_lines(roofline: Roofline, estimate: SpeedEstimate) -> Iterator[str]:
    """Yield lines on decoding alone, with prompts read on other replicas, and the number of those replicas.

    A prompt alone takes p seconds. A replica that decodes ends batch / (output steps x step) requests a second. So p
    times as many replicas of the same layout read prompts for it (How To Scale Your Model, part 8).
    """
    traffic = estimate.traffic
    inputs, cached, rates, prefills, shares = traffic.read_tokens, traffic.cached_tokens, [], [], []
    chunks = max(1, math.ceil(inputs / roofline.max_num_batched_tokens))
    for factors, speed in ((IDEAL, estimate.ideal), (estimate.factors, estimate.expected)):
        stages = roofline.layout.pipeline_parallel_size
        tokens = stages * inputs / chunks
        alone = roofline.step(tokens, 0, traffic.mean_context, factors, inputs, cached_tokens=cached)
        prefills.append((chunks + stages - 1) / stages * alone.total_s)
        rates.append(estimate.batch * traffic.acceptance_length / speed.step.total_s)
        shares.append(prefills[-1] * rates[-1] / traffic.output_tokens)
    if not traffic.decode_only:
        yield f"  {'output tokens/s, decoding alone':34}{rates[0]:12,.0f}{rates[1]:12,.0f}"
    yield f"  {'a prompt alone':34}{_ms(prefills[0])}{_ms(prefills[1])}"
    yield f"  {'replicas for prompts, each decoding':34}{shares[0]:11.2f} {shares[1]:11.2f}"


def speed_json(estimates: list[SpeedEstimate]) -> dict[str, Any]:
    """Return estimates under stable keys. Times are in seconds, rates per second."""
    traffic = estimates[0].traffic
    return {
        "arrivals": traffic.arrivals,
        "decode_only": traffic.decode_only,
        "figures": "ideal" if estimates[0].is_ideal else "expected",
        **{
            name: getattr(traffic, name)
            for name in ("input_tokens", "output_tokens", "longest_output_tokens", "prefix_hits", "acceptance_length")
        },
        "factors": {name: getattr(EXPECTED, name) for name in _MEANING},
        "by_concurrency": [_estimate(estimate) for estimate in estimates],
    }


def _estimate(estimate: SpeedEstimate) -> dict[str, Any]:
    return {
        "concurrency": estimate.traffic.concurrency,
        "running": estimate.batch,
        "bound": estimate.bound,
        "output_tokens_per_s_per_gpu": estimate.output_tokens_per_s_per_gpu,
        "output_tokens_per_usd": estimate.output_tokens_per_usd,
        **({"measured": asdict(estimate.measured)} if estimate.measured else {}),
        "ideal": _speed(estimate.ideal),
        "expected": _speed(estimate.expected),
    }


def _speed(speed: Speed) -> dict[str, Any]:
    times = [name for name in StepTime.__dataclass_fields__ if name.endswith("_s")]
    return {
        **{name: getattr(speed, name) for name in _SPEED_KEYS},
        "step": {name: getattr(speed.step, name) for name in (*times, "total_s")},
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:9,.2f} ms" if seconds < 10 else f"{seconds:10,.2f} s"
