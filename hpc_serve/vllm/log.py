"""Reads lines of an engine's log: the stage of the start, and the figures that vLLM prints.

It reads one line at a time. The words are vLLM's, as data in `data/log.ini`; an unknown line has no meaning.
`start_progress` decides whether a start makes progress, and `diagnose` why one failed.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.sizes import GIB
from hpc_serve.vllm.report_line import read_report

WEIGHTS_LOADED = "weights loaded"
SERVER_IS_UP = "server is up"
_HEALTH_ANSWER = re.compile(r'"(GET|HEAD) /health HTTP/[\d.]+" 200\b')


def _patterns(section: Mapping[str, str]) -> Iterator[str]:
    return filter(None, section["line"].splitlines())


_LINES = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",), empty_lines_in_values=False)
_LINES.read_string((Path(__file__).parent / "data" / "log.ini").read_text(encoding="utf-8"))
_STAGES = [
    (re.compile(pattern), _LINES[name].get("stage", name))
    for name in _LINES.sections()
    if name != "figures"
    for pattern in _patterns(_LINES[name])
]
_FIGURES = [re.compile(re.sub(r"<(\w+)>", r"(?P<\1>-?[\\d.,]+)", pattern)) for pattern in _patterns(_LINES["figures"])]


@dataclass(frozen=True)
class StartStage:
    """A short phrase, and how much of it is done where the engine says so."""

    name: str
    done: int | None = None
    total: int | None = None


def read_stage(line: str) -> StartStage | None:
    """Return the stage that `line` announces, or None.

    >>> read_stage("Loading safetensors checkpoint shards:   1% Completed | 2/191 [00:09<15:58,  5.07s/it]")
    StartStage(name='loading weights', done=2, total=191)
    """
    for pattern, name in _STAGES:
        if found := pattern.search(line):
            return StartStage(name, *map(int, found.groups()))
    return None


def read_figures(line: str) -> dict[str, float]:
    """Return the figures in `line`, by the names that the planner uses; empty for a line without any.

    Names: checkpoint_bytes, model_loading_bytes, kv_cache_bytes, kv_cache_tokens, max_concurrency, max_model_len,
    num_blocks, activation_bytes, non_torch_bytes, consumed_bytes, cuda_graph_bytes, cuda_graph_estimate_bytes,
    total_bytes, loading_weights_s, init_engine_s. vLLM prints GiB with two digits, so sizes are good to 10 MiB.

    >>> read_figures("GPU KV cache size: 410,128 tokens, Maximum concurrency for 131,072 tokens per request: 3.13x")
    {'kv_cache_tokens': 410128, 'max_model_len': 131072, 'max_concurrency': 3.13}
    """
    found: dict[str, float] = {}
    for pattern in _FIGURES:
        if match := pattern.search(line):
            for name, text in match.groupdict().items():
                value = float(text.strip(",.").replace(",", ""))
                value = round(value * GIB) if name.endswith("_bytes") else value
                found[name] = int(value) if value == int(value) else value
    return found


def is_idle_report(line: str) -> bool:
    """Return whether `line` is vLLM's report, every ten seconds, of an engine that does next to nothing."""
    report = read_report(line)
    return report is not None and report.does_next_to_nothing


def is_decoder_note(line: str) -> bool:
    """Return whether `line` says that another decoder of audio is tried: vLLM says so at each request with audio.

    >>> is_decoder_note("WARNING 11-26 16:52:11 [audio.py:478] torchcodec unavailable (ImportError()); falling back")
    True
    """
    return "torchcodec unavailable" in line


def is_health_answer(line: str) -> bool:
    """Return whether `line` says that somebody asked `/health` and was told that the engine is well.

    >>> is_health_answer('INFO:     10.0.0.1:4711 - "GET /health HTTP/1.1" 200 OK')
    True
    """
    return _HEALTH_ANSWER.search(line) is not None
