"""The lines of --explain on a plan's speed: one step, ideal beside expected, and the factors between the two."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_serve.plan.report.speed import lengths_text, measured_text
from hpc_serve.plan.speed.burst import read_prompts
from hpc_serve.plan.speed.estimate import SpeedEstimate
from hpc_serve.plan.speed.limits import limit_lines
from hpc_serve.plan.speed.step import FITTED, IDEAL

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
        f"Speed of one replica, {traffic.concurrency} requests in flight {lengths_text(traffic)} ("
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
