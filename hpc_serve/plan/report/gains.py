"""Says what an option gains: drafts, and a cache in the node's memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hpc_serve.plan.speed.drafts import KnownDraft
from hpc_serve.plan.speed.estimate import ReplicaSpeeds, SpeedEstimate
from hpc_serve.plan.speed.links import ASSUMED_LINK_BYTES_PER_S
from hpc_serve.plan.speed.step import EXPECTED, Roofline


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
