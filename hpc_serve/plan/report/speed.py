"""The sentences on a plan's speed: what it is of, how near it is to what was measured, and what limits it.

Two sentences say what an option gains: drafts, and a cache in the node's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.plan.catalog import speed_accuracy
from hpc_serve.plan.hardware import AcceleratorKind
from hpc_serve.plan.speed.estimate import OTHERS, ReplicaSpeeds, SpeedEstimate, range_class, speed_column, speed_range
from hpc_serve.plan.speed.measured import KnownDraft
from hpc_serve.plan.speed.step import ASSUMED_LINK_BYTES_PER_S, EXPECTED, IDEAL, Roofline
from hpc_serve.plan.speed.throughput import Traffic, critical_batch
from hpc_serve.units import number_of

_WORTH_WHILE = 0.5
"""Twice as many requests are worth their wait if they give at least so much more tokens/s, as a share."""


# -- what options gain


def speculation_text(
    replica: ReplicaSpeeds, plain: ReplicaSpeeds, estimates: Sequence[SpeedEstimate], known: KnownDraft | None
) -> str:
    """Return what speculation gains where its accepted drafts are known, else from how many of them on it pays.

    `plain` is the replica without speculation. `estimates` are those to name, by requests in flight.
    """
    accepted = replica.traffic.acceptance_length
    if accepted == 1:
        return (
            "Speculation: the speed counts no draft as accepted. It pays where a step gives more than "
            f"{_break_even(plain.roofline, estimates)} (vLLM logs it as 'Mean acceptance length'; "
            "--acceptance-length counts it)."
        )

    def gain(concurrency: int) -> float:
        with_drafts, without = (one.at(concurrency).speed.output_tokens_per_s for one in (replica, plain))
        return with_drafts / without

    whence = f" (published for {known.texts}: {known.source})" if known else ""
    gains = ", ".join(
        f"× {gain(one.traffic.concurrency):.2f} with {one.traffic.concurrency:,} in flight" for one in estimates
    )
    held = replica.held()
    counts = sorted({*(1 << power for power in range(held.bit_length())), held})
    end = _where_it_pays([(count, gain(count) >= 1) for count in counts])
    return f"Speculation, {accepted:.3g} tokens a step{whence}: {gains}. {end}."


def _where_it_pays(found: Sequence[tuple[int, bool]]) -> str:
    """Say with how many requests in flight it pays, by what is `found` for growing numbers of them.

    More requests read more experts, so drafts may cost less with many requests in flight than with few.

    >>> _where_it_pays([(1, False), (2, True), (4, True), (8, False)])
    'It pays with about 2 to 4 in flight'
    """
    runs = [list(run) for pays, run in itertools.groupby(found, key=lambda one: one[1]) if pays]
    if not runs:
        return "It does not pay"
    first, most = found[0][0], found[-1][0]
    (low, _), (high, _) = runs[0][0], runs[0][-1]
    if len(runs) == 1 and low == first:
        return (
            f"It pays up to the {most:,} that are held at once"
            if high == most
            else f"It pays up to about {high:,} in flight"
        )
    parts = [f"{run[0][0]:,}" + (f" to {run[-1][0]:,}" if len(run) > 1 else "") for run in runs]
    return f"It pays with about {' and '.join(parts)} in flight"


def _break_even(plain: Roofline, estimates: Sequence[SpeedEstimate]) -> str:
    """Return the tokens of a step from which speculation pays, by requests in flight."""
    found = []
    for one in estimates:
        context = one.traffic.mean_context
        ratio = one.roofline.decode(one.batch, context).total_s / plain.decode(one.batch, context).total_s
        found.append(f"{ratio:.1f} tokens with {one.traffic.concurrency:,} in flight")
    return ", ".join(found)


def offloading_text(roofline: Roofline) -> str:
    """Return how long a prefix takes to come from the node's memory, beside how long it takes to read it anew."""
    tokens = 1000
    held = max(stage.attention_bytes_per_token for stage in roofline.work.stages) * len(roofline.work.stages)
    copy_s = tokens * held / ASSUMED_LINK_BYTES_PER_S
    read_s = roofline.step(len(roofline.work.stages) * tokens, 0, tokens, EXPECTED, tokens).pass_s
    return (
        f"--kv-offloading-size: {tokens:,} tokens of a prefix come from the node's memory in {1000 * copy_s:,.1f} ms "
        f"(PCIe 4.0 x16 is assumed), and are read anew in {1000 * read_s:,.1f} ms. A prompt that lies there gets its "
        f"first token up to {read_s / copy_s:,.0f} times as early; --prefix-hits SHARE counts prefixes that are on the "
        "GPU."
    )


# -- what the speed is of, and what limits it


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
    return f"requests {lengths_text(traffic)}"


def lengths_text(traffic: Traffic) -> str:
    """Say in words how many tokens go in and out."""
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
    return f"measured here on {number_of(runs, 'run')}: × {times}{some}"


def range_of(estimate: SpeedEstimate) -> tuple[float, float] | None:
    """Return the range of an expected speed, in multiples of it: 17 of 20 measurements are there."""
    if estimate.measured is not None:
        return estimate.measured.bounds
    found = speed_range(estimate.roofline, estimate.traffic)
    return None if found is None else tuple(found["measured_by_printed"])


def range_text(estimates: Sequence[SpeedEstimate]) -> str | None:
    """Say whence the range is, and by which runs here figures are corrected. None if there is neither."""
    roofline = estimates[0].roofline
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


def start_text(estimate: SpeedEstimate) -> str | None:
    """Say how long the first requests of a run wait, which arrive at once. None if none arrive so, or all do."""
    traffic = estimate.traffic
    if traffic.arrivals != "steady" or traffic.decode_only or traffic.concurrency == 1:
        return None
    factors = IDEAL if estimate.is_ideal else estimate.factors
    first = speed_column(estimate.roofline, replace(traffic, arrivals="burst"), estimate.batch, factors)
    return (
        f"At the start of a run, where {traffic.concurrency:,} arrive at once, their TTFT is {first.ttft_s:,.1f} s on "
        "average."
    )


def knee_text(replica: ReplicaSpeeds) -> str:
    """Say up to which number of requests in flight more of them pay.

    The number is the first power of two from which twice as many requests give less than half as many tokens/s more.
    """
    held = replica.held()
    count, here = 1, replica.at(1).speed
    while 2 * count <= held:
        twice = replica.at(2 * count).speed
        gain = twice.output_tokens_per_s / here.output_tokens_per_s - 1
        if gain < _WORTH_WHILE:
            return (
                f"The knee is at about {count:,} in flight: twice as many give {100 * gain:.0f} % more tokens/s, "
                f"with {1000 * twice.tpot_s:,.1f} ms between tokens where it was {1000 * here.tpot_s:,.1f}."
            )
        count, here = 2 * count, twice
    return f"No knee: tokens/s still grow well at the {held:,} requests that are held at once."


def critical_text(replica: ReplicaSpeeds) -> str:
    """Return the batch from which FLOP/s take longer than reading weights, beside what is held."""
    batch, held = critical_batch(replica.roofline), replica.held()
    if batch is None:
        return "No critical batch: reading the weights takes longer than the FLOP/s at any batch."
    text = f"The critical batch is {batch:,}: from there on FLOP/s take longer than reading the weights, both ideal."
    return f"{text} {held:,} are held at once" + (", so it is never reached." if held < batch else ".")
