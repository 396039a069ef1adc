"""vLLM's log lines, as versions 0.6 to 0.32 print them, become phrases, figures, reports and signs of life."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_serve.units import GIB, MIB
from hpc_serve.vllm import log

LINES = json.loads(Path(__file__).with_name("log_lines.json").read_text(encoding="utf-8"))
"""Lines as vLLM printed them; sources as in benchmarks/accuracy/data/memory_cases.jsonl. Sizes are in GiB."""


@pytest.mark.parametrize(("line", "phrase"), LINES["phrases"])
def test_phrase_of_a_line(line, phrase):
    assert log.read_phrase(line) == (None if phrase is None else log.StartPhrase(*phrase))


@pytest.mark.parametrize(("line", "figures"), LINES["figures"])
def test_figures_of_a_line(line, figures):
    wanted = {name: round(value * GIB) if name.endswith("_bytes") else value for name, value in figures.items()}
    assert log.read_figures(line) == wanted


@pytest.fixture
def clock():
    """The seconds of a made-up clock."""
    return [0.0]


@pytest.fixture
def progress(clock):
    return log.StallWatch(lambda: clock[0])


def look(progress, clock, seconds, bytes_at):
    """Look each second, and tell how much was read; returns the longest time without progress."""
    longest_s = 0.0
    for second in seconds:
        clock[0] = second
        progress.note_read_bytes(bytes_at(second))
        longest_s = max(longest_s, progress.idle_s)
    return longest_s


@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("Loading safetensors checkpoint shards:   1% Completed | 2/191 [00:09<15:58,  5.07s/it]", True),
        ("(EngineCore pid=1) INFO [shm.py:1] No available shared memory broadcast block found in 60 s", False),
        ("INFO [ray_utils.py:1] Waiting for creating a placement group of specs for 40 seconds.", False),
        ('INFO:     10.0.0.1:1234 - "GET /health HTTP/1.1" 503 Service Unavailable', False),
    ],
)
def test_a_line_is_a_sign_of_life_unless_it_only_says_that_it_waits(progress, clock, line, moves):
    clock[0] = 100
    progress.note_line(line)
    assert progress.idle_s == (0 if moves else 100)


def test_what_idle_processes_read_is_no_load_and_a_slow_load_is_one(progress, clock):
    progress.note_read_bytes(500 * MIB)  # importing
    assert look(progress, clock, range(1, 3_601), lambda second: 500 * MIB + 5_000 * second) == 3_600
    look(progress, clock, range(3_601, 10_800), lambda second: 600 * MIB + 5 * MIB * (second - 3_600))
    assert progress.idle_s < 2


def test_a_slow_load_is_one_though_a_process_that_had_read_more_has_ended(progress, clock):
    progress.note_read_bytes(3_000 * MIB)  # with a process that only imported
    assert look(progress, clock, range(1, 1_001), lambda second: 500 * MIB + 2 * MIB * second) < 2


def test_a_time_in_which_nobody_looked_is_no_time_without_progress(progress, clock):
    """A job that is suspended stands still as a whole."""
    for at, idle_s in ((30, 30), (4_000, 0), (4_050, 50)):
        clock[0] = at
        progress.note_read_bytes(0)
        assert progress.idle_s == idle_s


@pytest.mark.parametrize(
    ("prompt", "generation", "running", "is_idle"),
    [("0.4", "0.4", 0, True), ("0.0", "1.0", 0, True), ("0.0", "7.2", 0, False), ("0.0", "0.1", 1, False)],
)
def test_a_report_of_next_to_nothing_is_known(prompt, generation, running, is_idle):
    line = (
        "(APIServer pid=7) INFO 11-22 02:00:00 [loggers.py:271] Engine 000: "
        f"Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {generation} tokens/s, "
        f"Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
    )
    assert log.is_idle_report(line) is is_idle


@pytest.mark.parametrize(
    ("said", "is_dropped"),
    [
        ('"GET /health HTTP/1.1" 200 OK', True),
        ('"HEAD /health HTTP/1.1" 200 OK', True),
        ('"GET /health HTTP/1.1" 503 Service Unavailable', False),
        ('"GET /healthy HTTP/1.1" 200 OK', False),
        ('"POST /v1/completions HTTP/1.1" 200 OK', False),
    ],
)
def test_answers_that_all_is_well_are_known(said, is_dropped):
    assert log.is_health_answer(f"(APIServer pid=7) INFO:     10.0.0.1:4711 - {said}") is is_dropped


# -- the report of every ten seconds

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
    found = log.read_report(HEAD + RATES + line)
    assert (found.prompt_tokens_per_s, found.generation_tokens_per_s) == (347.3, 124.2)
    assert (found.running, found.waiting) == (running, waiting)
    assert found.cache_use == pytest.approx(cache_use)


@pytest.mark.parametrize(
    "line",
    ["", "Running: 8 reqs", RATES, RATES.replace("124.2", "1.2.4") + "Running: 1 reqs", f"{RATES * 2}Running: x reqs"],
)
def test_what_is_none(line):
    assert log.read_report(line) is None


def test_parts_of_an_engine_are_added():
    one = log.EngineReport(prompt_tokens_per_s=1.0, generation_tokens_per_s=2.0, running=3, waiting=4, cache_use=0.5)
    other = log.EngineReport(prompt_tokens_per_s=1.0, generation_tokens_per_s=2.0, running=3, waiting=4, cache_use=0.75)
    both = log.EngineReport(prompt_tokens_per_s=2.0, generation_tokens_per_s=4.0, running=6, waiting=8, cache_use=0.75)
    assert one.plus(other) == both
    assert one.plus(None) is one
