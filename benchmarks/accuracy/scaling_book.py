"""The chapter "Serving LLaMA 3-70B on TPUs" of "How To Scale Your Model", figure by figure, computed by hpc_serve.

The page's figures are compared with our arithmetic: those of February 2025, and today's in data/scaling_book.json.
scaling_book_problems.py answers the worked problems. `python -m benchmarks.accuracy.scaling_book` prints both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from hpc_serve.errors import DoesNotFitError
from hpc_serve.plan import AcceleratorSpec, EngineConfig, ModelSpec, accelerator, model_from_config, resolve
from hpc_serve.plan.choice.layout import Layout
from hpc_serve.plan.hardware import chip_count
from hpc_serve.plan.memory.kv_cache import full_context_bytes
from hpc_serve.plan.speed.step import IDEAL, Roofline, StepTime, axis_bytes_per_s, model_parallel_limit

V5E, V5P, H100 = accelerator("v5e"), accelerator("v5p"), accelerator("h100-80gb")
BANDWIDTH = V5E.bandwidth_bytes_per_s or 0
CHIP_BYTES = V5E.label_bytes
FLOPS = V5E.dense_flops["bf16"]
WIDTHS = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
CONTEXT, ANSWER = 8192, 512
INT8_CACHE: EngineConfig = EngineConfig(kv_cache_dtype="int8")
FULL_STEP_S = CHIP_BYTES / BANDWIDTH
PAGE_STEP_S = 0.019
"""The page rounds the 19.5 ms of `FULL_STEP_S` to this, and uses it in its next questions."""


def smallest_slice(accelerator: AcceleratorSpec, size_bytes: float) -> str:
    """The smallest topology whose memory, by the label, holds so many bytes. Raises DoesNotFitError."""
    for name in accelerator.slices:
        if chip_count(name) * accelerator.label_bytes >= size_bytes:
            return name
    raise DoesNotFitError(f"no slice of {accelerator.product} holds {size_bytes / 1e9:,.0f} GB.")


def small_batch_limit(accelerator: AcceleratorSpec, intermediate_size: int, batch: float) -> float:
    """The most chips for a small batch before the links take longer than loading weights.

    F ÷ (B·β), where β = W_hbm ÷ W_ici.
    """
    assert accelerator.bandwidth_bytes_per_s
    beta = accelerator.bandwidth_bytes_per_s / axis_bytes_per_s(accelerator)
    return intermediate_size / (batch * beta)


def spec(name: str) -> ModelSpec:
    return model_from_config(resolve(name).config, name=name)


LLAMA: ModelSpec = spec("70b")
SMALL: ModelSpec = spec("8b")
LARGE: ModelSpec = spec("405b")
BYTES_PER_TOKEN = {
    "bf16": float(full_context_bytes(LLAMA, EngineConfig(), 1)),
    "int8": float(full_context_bytes(LLAMA, INT8_CACHE, 1)),
    "int4": full_context_bytes(LLAMA, INT8_CACHE, 1) / 2,
}


def weights(kind: str, model: ModelSpec = LLAMA) -> float:
    return model.parameters * WIDTHS[kind]


def smallest(kind: str) -> int:
    """Chips of the smallest slice that holds the weights."""
    return chip_count(smallest_slice(V5E, weights(kind)))


def free_bytes(kind: str, count: int) -> float:
    """Bytes that `count` chips have left for caches."""
    return count * CHIP_BYTES - weights(kind)


def caches(kind: str, count: int) -> float:
    """Sequences of 8k whose caches fill these bytes."""
    return free_bytes(kind, count) / (CONTEXT * BYTES_PER_TOKEN[kind])


def queries_per_s(kind: str, count: int) -> float:
    """Answers of 512 tokens per second on a full slice, from the page's earlier answers: 43 (138) caches, 19 ms."""
    return round(caches(kind, count)) / (PAGE_STEP_S * ANSWER)


def tensor_parallel(count: int) -> Layout:
    return Layout(tensor_parallel_size=count, pipeline_parallel_size=1)


def pooled(count: int, model: ModelSpec = LLAMA, *, quantization: str | None = "int8") -> Roofline:
    """The model on a slice as the page has it: one device with `count` times the rates.

    Weights and caches divide evenly, and communication takes no time. int8 weights are multiplied in bf16.
    """
    built = model_from_config(resolve(model.name).config, name=model.name, quantization=quantization)
    chip = replace(V5E, dense_flops={"bf16": count * FLOPS}, bandwidth_bytes_per_s=count * BANDWIDTH)
    return Roofline(built, chip, INT8_CACHE, tensor_parallel(1))


def step(count: int, batch: float, context: int) -> StepTime:
    return pooled(count).decode(batch, context, IDEAL)


def mlp_flops(tokens: int) -> float:
    """Operations of the three matrices of all 80 layers."""
    return tokens * 2 * 3 * 8192 * 28672 * 80


def prefill_s(*, with_attention: bool, count: int = 16, share: float = 0.4) -> float:
    """Seconds for one prompt of 8,192 tokens at that share of the peak, with logits for its last token only."""
    roofline = pooled(count, quantization=None)
    reached = share / roofline.accelerator.matmul_share
    factors = replace(IDEAL, flops=reached, attention_flops=reached)
    return roofline.step(CONTEXT, 0, CONTEXT, factors, CONTEXT if with_attention else 0).flops_s


PROMPT_S = 2 * LLAMA.parameters * CONTEXT / (16 * FLOPS * 0.4)
"""The page's prefill: 2·N·T at 40 % of the peak of 16 chips. 8 chips take as long in int8."""

Verdict = Literal["agrees", "rounded", "slip", "corrected"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One figure. `printed` is what the page prints. `right` is what it should print, where that differs.

    "rounded": the page cut digits, or went on with a rounded number. "slip": its arithmetic gives another number.
    "corrected": a slip that today's page no longer has.
    """

    where: str
    printed: str
    ours: float
    verdict: Verdict = "agrees"
    right: str = ""
    why: str = ""


def is_close(value: float, digits: str) -> bool:
    """Whether a value agrees with digits: to half of the last digit, or to 1 %, by which 70e9 parameters differ."""
    said = Decimal(digits)
    exponent = said.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(value - float(said)) <= max(0.5 * 10.0**exponent, 0.01 * float(said)) * (1 + 1e-9)


Row = tuple[str, str, float] | tuple[str, str, float, Verdict, str, str]


def entry(where: str, printed: str, ours: float, verdict: Verdict = "agrees", right: str = "", why: str = "") -> Entry:
    return Entry(where=where, printed=printed, ours=ours, verdict=verdict, right=right, why=why)


def entries(*rows: Row) -> list[Entry]:
    """Rows of (where, printed, ours), followed by (verdict, right, why) where the page is wrong."""
    return [entry(*row) for row in rows]


TOKEN = BYTES_PER_TOKEN["int8"]
IN_240 = 240 * 32768 * TOKEN
PER_USD = {"v5p": V5P.dense_flops["bf16"] / 4.2, "v5e": FLOPS / 1.2, "H100": H100.dense_flops["bf16"] / 10.8}
"""FLOP/s for each dollar an hour, at the page's prices; times 3,600 it is FLOPs for a dollar."""
HOUR = "FLOP/s ÷ (USD an hour) was printed; FLOPs for a dollar are 3,600 times that"
SUB_BYTE = "half a byte for each of 70e9 is 35 GB"
LEFT = "the old page was 10 GB off either way"
ROUNDED = "43 ÷ (19 ms × 512 × chips); unrounded, 42.8 and 19.5 ms, it is {:.2f}"
DOUBLED = "138 caches (140 on today's page, hence 0.45, 0.9, 1.8), not 161"
FULL = {kind: smallest(kind) for kind in WIDTHS}
RATE = {kind: queries_per_s(kind, count) / count for kind, count in FULL.items()}
WIDE = {kind: queries_per_s(kind, 2 * count) / (2 * count) for kind, count in FULL.items()}
EXACT = {kind: ROUNDED.format(caches(kind, n) / (FULL_STEP_S * ANSWER * n)) for kind, n in FULL.items()}

SEED = entries(
    ("FLOP/s per USD/h, v5p", "1.09e14", PER_USD["v5p"]),
    ("FLOP/s per USD/h, v5e", "1.64e14", PER_USD["v5e"]),
    ("FLOP/s per USD/h, H100", "9.1e13", PER_USD["H100"]),
    ("FLOPs per USD, v5p", "1.09e14", 3600 * PER_USD["v5p"], "corrected", "3.9e17", HOUR),
    ("FLOPs per USD, v5e", "1.64e14", 3600 * PER_USD["v5e"], "corrected", "5.9e17", HOUR),
    ("FLOPs per USD, H100", "9.1e13", 3600 * PER_USD["H100"], "corrected", "3.3e17", HOUR),
    ("compute-bound batch, bf16", "240", FLOPS / BANDWIDTH * 2 / 2),
    ("compute-bound batch, int8 weights", "120", FLOPS / BANDWIDTH * 1 / 2),
    ("compute-bound batch, int4 weights", "60", FLOPS / BANDWIDTH * 0.5 / 2),
    ("parameters, 1e9", "70", LLAMA.parameters / 1e9),
    ("cache of a token, int8, KiB", "160", TOKEN / 1024),
    ("cache of 32k tokens, GB", "5.3", 32768 * TOKEN / 1e9, "rounded", "5.4", "163,840 bytes a token, 162e3 was taken"),
    ("caches of 240 such, TB", "1.3", IN_240 / 1e12),
    (
        *("chips for 240 sequences of 32k", "86", math.ceil((weights("int8") + IN_240) / CHIP_BYTES)),
        *("rounded", "85", "84.9 full chips, so 85; 85.6 only with the caches rounded up to 1.3 TB"),
    ),
    ("weights, bf16, GB", "140", weights("bf16") / 1e9),
    ("weights, int8, GB", "70", weights("int8") / 1e9),
    ("weights, int4, GB", "45", weights("int4") / 1e9, "corrected", "35", SUB_BYTE),
    ("least chips, bf16", "8.75", weights("bf16") / CHIP_BYTES),
    ("least chips, int8", "4.38", weights("int8") / CHIP_BYTES),
    ("least chips, int4", "2.81", weights("int4") / CHIP_BYTES, "slip", "2.19", "35 ÷ 16; 2.81 is 45 ÷ 16"),
    ("smallest slice, bf16, chips", "16", FULL["bf16"]),
    ("smallest slice, int8, chips", "8", FULL["int8"]),
    ("smallest slice, int4, chips", "4", FULL["int4"]),
    ("memory left, bf16, GB", "116", free_bytes("bf16", 16) / 1e9),
    ("memory left, int8, GB", "68", free_bytes("int8", 8) / 1e9, "corrected", "58", "128 - 70; " + LEFT),
    ("memory left, int4, GB", "19", free_bytes("int4", 4) / 1e9, "corrected", "29", "64 - 35; " + LEFT),
    ("caches of 8k, bf16", "43", caches("bf16", 16)),
    ("caches of 8k, int8", "52", caches("int8", 8), "corrected", "43", "58 GB ÷ 1.34 GB, not 68 or 70"),
    ("caches of 8k, int4", "67", caches("int4", 4), "corrected", "43", "29 GB ÷ 0.67 GB; 19 would hold 28"),
    ("step with the memory full, ms", "19", 1000 * FULL_STEP_S, "rounded", "19.5", "16 GB ÷ 8.2e11 cut, not rounded"),
    ("512 steps, s", "9", ANSWER * FULL_STEP_S, "rounded", "10", "512 × 19.5 ms; × 19 ms is 9.7, cut again to 9"),
    (
        *("step of int4 weights alone, ms", "10", 1000 * weights("int4") / (4 * BANDWIDTH)),
        *("rounded", "10.7", "35 GB ÷ 4 chips of 8.2e11, cut; with the 45 GB printed it would be 13.7"),
    ),
    ("queries a second × chips", "4.42", queries_per_s("bf16", 16)),
    ("queries a second and chip, bf16", "0.27", RATE["bf16"], "rounded", "0.28", "0.276, cut; " + EXACT["bf16"]),
    ("queries a second and chip, int8", "0.66", RATE["int8"], "corrected", "0.55", "was of 52; " + EXACT["int8"]),
    ("queries a second and chip, int4", "1.72", RATE["int4"], "corrected", "1.11", "was of 67; " + EXACT["int4"]),
    (
        "memory left on 4x8 in bf16, GB",
        "186",
        free_bytes("bf16", 32) / 1e9,
        "corrected",
        "372",
        "512 - 140; half is 186",
    ),
    ("batch on 4x8 in bf16", "161", caches("bf16", 32), "corrected", "138", "372 ÷ 2.68 GB a sequence"),
    ("queries a second × chips, doubled", "16.54", queries_per_s("bf16", 32), "corrected", "14.2", DOUBLED),
    ("queries a second and chip, 4x8, bf16", "0.51", WIDE["bf16"], "corrected", "0.44", DOUBLED),
    ("queries a second and chip, 4x4, int8", "1.03", WIDE["int8"], "corrected", "0.9", DOUBLED),
    ("queries a second and chip, 2x4, int4", "2.06", WIDE["int4"], "corrected", "1.8", DOUBLED),
    ("C ÷ W_ici", "2550", FLOPS / axis_bytes_per_s(V5E), "corrected", "2200", "1.97e14 ÷ 9e10"),
    ("chips that two axes can feed", "22", model_parallel_limit(V5E, 28672, 2), "corrected", "26", "57,344 ÷ 2,189"),
    (
        *("MLPs of 240 tokens, 1e12 operations", "26", mlp_flops(240) / 1e12),
        *("slip", "27", "240 × 2 × 3 × 8,192² × 3.5 × 80 is 27.06e12"),
    ),
    (
        *("those on 4x2 in int8, ms", "8", 1000 * mlp_flops(240) / (8 * V5E.dense_flops["int8"])),
        *("slip", "8.6", "of 27.06e12; and it is 240 tokens, not the prompt of 8k it speaks of, see below"),
    ),
    (
        *("prefill of 8k on 4x2 in int8, MLPs, ms", "8", 1000 * mlp_flops(8192) / (8 * V5E.dense_flops["int8"])),
        *("corrected", "294", "8,192 tokens, not 240: 34 times as much; today's page counts the prompt (0.91 s)"),
    ),
    (
        *("prefill with ÷ without attention", "1.25", prefill_s(with_attention=True) / prefill_s(with_attention=False)),
        *("slip", "1.08", "the page guesses 16 ms to become 20 to 30; causal attention adds 7.8 %, all pairs 15.7 %"),
    ),
    ("steps until one of 240 answers ends", "2", ANSWER / 240),
    (
        *("servers of prompts to one of answers, batch 240", "1", 240 * PROMPT_S / (ANSWER * FULL_STEP_S)),
        *("slip", "22", "a prompt of 8k takes 0.92 s, not 2 steps; 240 such do not fit 4x2 either"),
    ),
    ("step on 4x4, batch 1, ms", "5.5", 1000 * step(16, 1, CONTEXT).total_s),
    ("step on 4x4, memory full, ms", "20", 1000 * step(16, caches("int8", 16), CONTEXT).total_s),
    ("plateau at 2k, tokens a ms and chip", "1", 0.24 / step(16, 240, 2048).total_s / 16),
)

SMALL_STEP = step(8, 32, CONTEXT)
TODAY = entries(
    ("FLOPs per USD, v5p", "3.9e17", 3600 * PER_USD["v5p"]),
    ("FLOPs per USD, v5e", "5.8e17", 3600 * PER_USD["v5e"], "rounded", "5.9e17", "1.97e14 × 3,600 ÷ 1.2 is 5.91e17"),
    ("FLOPs per USD, H100", "3.3e17", 3600 * PER_USD["H100"]),
    ("32 caches of 8k, GB", "41.9", 32 * CONTEXT * TOKEN / 1e9, "rounded", "42.9", "163,840 bytes, 160e3 was taken"),
    (
        *("chips for those and the weights", "7", math.ceil((weights("int8") + 32 * CONTEXT * TOKEN) / CHIP_BYTES)),
        *("rounded", "8", "113.5 GB are 7.09 chips; 112 GB were just 7. The slice is 4x2 either way"),
    ),
    ("step on 4x2, batch 32, ms", "17", 1000 * SMALL_STEP.total_s),
    (
        *("tokens a second on 4x2, batch 32", "1882", 32 / SMALL_STEP.total_s),
        *("rounded", "1847", "32 ÷ 17.3 ms; 1,882 is of the rounded 17 ms"),
    ),
    ("the same a chip", "235", 4 / SMALL_STEP.total_s, "rounded", "231", "of the rounded 17 ms"),
    ("step on 4x4, batch 32, ms", "8.5", 1000 * step(16, 32, CONTEXT).total_s, "rounded", "8.7", "half of 17.3 ms"),
    ("chips at batch 64 before links bind", "56", small_batch_limit(V5E, 28672, 64), "rounded", "49", "β 9.1, not 8"),
    ("4x8, batch 64: links, µs", "11", 2e6 * 64 * 8192 / axis_bytes_per_s(V5E), "rounded", "11.7", "11.65, cut"),
    ("4x8, batch 64: memory, µs", "18", 2e6 * 8192 * 28672 / (32 * BANDWIDTH)),
    ("4x8, batch 64: FLOPs, µs", "4", 2e6 * 64 * 8192 * 28672 / (32 * FLOPS), "rounded", "4.8", "4.77, cut"),
    ("prefill of 8k on 4x4 at 40 %, 2·N·T, s", "0.91", PROMPT_S),
    (
        *("the same, with attention, s", "0.91", prefill_s(with_attention=True)),
        *("rounded", "0.96", "attention adds 0.07 s; looked-up embeddings and all logits but the last cost nothing"),
    ),
    ("sequences ended a step, batch 32", "0.0078125", 32 / 4096),
    ("tokens evicted a step, batch 32", "96", 32 * (CONTEXT + 4096) / 4096),
    ("servers of prompts to one of answers, batch 32", "3", 32 * PROMPT_S / (ANSWER * FULL_STEP_S)),
    (
        *("the same, memory full", "3", caches("bf16", 16) * PROMPT_S / (ANSWER * FULL_STEP_S)),
        *("slip", "3.9", "0.92 s × 43 ÷ (512 × 19.5 ms): the step is of a full memory, 43 sequences; 3 is of 32"),
    ),
)


def lines() -> list[str]:
    """The table for people."""
    found = []
    for title, rows in (("The page of February 2025", SEED), ("Today's page", TODAY)):
        found.append(f"{title:48} {'printed':>9} {'ours':>9}  verdict")
        for one in rows:
            why = f"  {one.right}: {one.why}" if one.why else ""
            found.append(f"  {one.where:46} {one.printed:>9} {one.ours:9.4g}  {one.verdict:9}{why}".rstrip())
    return found


if __name__ == "__main__":
    from benchmarks.accuracy.scaling_book_problems import answers

    print("\n".join([*lines(), "", *answers()]))
