"""Says what an option gains: drafts, and a cache in the node's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.plan.memory.estimate import MemoryEstimate
from hpc_serve.plan.speed.drafts import KnownDraft
from hpc_serve.plan.speed.estimate import SpeedEstimate, estimate_speed, held_at_once
from hpc_serve.plan.speed.step import ASSUMED_LINK_BYTES_PER_S, EXPECTED, Roofline


def speculation_text(
    roofline: Roofline,
    plain: Roofline,
    estimates: Sequence[SpeedEstimate],
    memory: MemoryEstimate,
    known: KnownDraft | None,
) -> str:
    """Return what speculation gains where its accepted drafts are known, else from how many of them on it pays.

    `plain` is the replica without speculation. `estimates` are those to name, by requests in flight.
    """
    traffic, drafts = estimates[0].traffic, roofline.engine.speculative_tokens
    if traffic.acceptance_length == 1:
        return (
            f"Speculation: it is not known how many of {drafts} drafts are accepted, so the speed counts none. It pays "
            f"where a step gives more than {_break_even(roofline, plain, estimates)} (vLLM logs it as 'Mean acceptance "
            "length'; --acceptance-length counts it)."
        )

    def gain(concurrency: int) -> float:
        asked = replace(traffic, concurrency=concurrency)
        without = estimate_speed(plain, replace(asked, acceptance_length=1), memory)
        return (
            estimate_speed(roofline, asked, memory).expected.output_tokens_per_s / without.expected.output_tokens_per_s
        )

    whence = f" (published for {known.texts}: {known.source})" if known else ""
    gains = ", ".join(
        f"× {gain(one.traffic.concurrency):.2f} with {one.traffic.concurrency:,} in flight" for one in estimates
    )
    held = held_at_once(roofline, traffic, memory)
    counts = [*(1 << power for power in range(held.bit_length())), held]
    paid = [count for count in counts if gain(count) >= 1]
    end = f"It pays up to about {paid[-1]:,} in flight" if paid else "It does not pay"
    if paid and paid[-1] == held:
        end = f"It pays up to the {held:,} that are held at once"
    return f"Speculation, {traffic.acceptance_length:.3g} tokens a step{whence}: {gains}. {end}."


def _break_even(roofline: Roofline, plain: Roofline, estimates: Sequence[SpeedEstimate]) -> str:
    """Return the tokens of a step from which speculation pays, by requests in flight."""
    found = []
    for one in estimates:
        context = one.traffic.mean_context
        ratio = roofline.decode(one.batch, context).total_s / plain.decode(one.batch, context).total_s
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
