"""vLLM's report of every ten seconds, in the words of several versions."""

from __future__ import annotations

import pytest

from hpc_serve.vllm.log import EngineReport, read_report

HEAD = "(APIServer pid=24920) INFO 11-22 14:19:46 [loggers.py:335] Engine 000: "
RATES = "Avg prompt throughput: 347.3 tokens/s, Avg generation throughput: 124.2 tokens/s, "


@pytest.mark.parametrize(
    ("line", "running", "waiting", "cache_use"),
    [
        ("Running: 8 reqs, Waiting: 3 reqs, CPU KV cache usage: 0.1%, Prefix cache hit rate: 10.2%", 8, 3, 0.001),
        ("Running: 8 reqs, Waiting: 3 reqs, Deferred: 1 reqs, Preemptions: 2, GPU KV cache usage: 50.0%", 8, 3, 0.5),
        ("Running: 8 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 97.6%", 8, 0, 0.976),
        ("Running: 1 reqs, Swapped: 0 reqs, Waiting: 2 reqs", 1, 2, None),
    ],
)
def test_a_report(line, running, waiting, cache_use):
    found = read_report(HEAD + RATES + line)
    assert (found.prompt_tokens_per_s, found.generation_tokens_per_s) == (347.3, 124.2)
    assert (found.running, found.waiting) == (running, waiting)
    assert found.cache_use == pytest.approx(cache_use)


@pytest.mark.parametrize(
    "line",
    ["", "Running: 8 reqs", RATES, RATES.replace("124.2", "1.2.4") + "Running: 1 reqs", f"{RATES * 2}Running: x reqs"],
)
def test_what_is_none(line):
    assert read_report(line) is None


def test_parts_of_an_engine_are_added():
    one = EngineReport(prompt_tokens_per_s=1.0, generation_tokens_per_s=2.0, running=3, waiting=4, cache_use=0.5)
    other = EngineReport(prompt_tokens_per_s=1.0, generation_tokens_per_s=2.0, running=3, waiting=4, cache_use=0.75)
    both = EngineReport(prompt_tokens_per_s=2.0, generation_tokens_per_s=4.0, running=6, waiting=8, cache_use=0.75)
    assert one.plus(other) == both
    assert one.plus(None) is one
