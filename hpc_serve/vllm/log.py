"""Reads lines of an engine's log: phrases of the start, the figures that vLLM prints, and its reports.

It reads one line at a time. The words are vLLM's; those of phrases and figures are data in `data/log.ini`. An unknown
line has no meaning. `StallWatch` decides whether a start still makes progress, by the lines and by how much is read.
`job/progress.py` decides which stage of the start a phrase belongs to, and `diagnose` why a start failed.
"""

from __future__ import annotations

import configparser
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.units import GIB, MIB

# -- the report of every ten seconds

_N = r"(\d{1,12}(?:\.\d{1,12})?)"
_REPORT = re.compile(
    rf"Avg prompt throughput: {_N} tokens/s, Avg generation throughput: {_N} tokens/s"
    rf".*?Running: (\d{{1,9}}) reqs?(?:.*?Waiting: (\d{{1,9}}) reqs?)?(?:.*?KV cache usage: {_N}%)?"
)
_IDLE_TOKENS_PER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Tokens a second since the last report; requests at this moment; the share of the cache in use, if it is said."""

    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    running: int
    waiting: int
    cache_use: float | None = None

    def plus(self, other: EngineReport | None) -> EngineReport:
        """Add the report of another part of the engine, made at the same moment."""
        if other is None:
            return self
        uses = [use for use in (self.cache_use, other.cache_use) if use is not None]
        return EngineReport(
            prompt_tokens_per_s=self.prompt_tokens_per_s + other.prompt_tokens_per_s,
            generation_tokens_per_s=self.generation_tokens_per_s + other.generation_tokens_per_s,
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            cache_use=max(uses, default=None),
        )


def read_report(line: str) -> EngineReport | None:
    """Return the report in `line`, or None.

    >>> read_report("Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 9.5 tokens/s, Running: 2 reqs, "
    ...     "Waiting: 1 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%").cache_use
    0.125
    """
    if (found := _REPORT.search(line)) is None:
        return None
    prompt, generation, running, waiting, cache_use = found.groups()
    return EngineReport(
        prompt_tokens_per_s=float(prompt),
        generation_tokens_per_s=float(generation),
        running=int(running),
        waiting=int(waiting or 0),
        cache_use=float(cache_use) / 100 if cache_use else None,
    )


# -- starts that make no progress

# Lines that repeat while nothing moves: vLLM's complaints, and the answers to our own probes.
_WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for creating a placement group|\"(?:GET|POST) /\S* HTTP/"
)
# Ray's processes read some hundred bytes a second when nothing happens; the slowest useful load is far from this.
_LOADS_BYTES_PER_S = MIB
# No look takes so long. If more time has passed the launcher stood still, and its engine perhaps as well: a suspended
# job.
_LONGEST_LOOK_S = 60.0


class StallWatch:
    """The time of a start's last progress, by the monotonic clock. Gaps between looks do not count as idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress_at, self._read_bytes = clock(), 0
        self._looked_at = self._progress_at

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._progress_at

    def note_line(self, line: str) -> None:
        """Count a line of the engine's log as progress, unless it only says that the engine waits."""
        if not _WAITING.search(line):
            self._progress_at = self._clock()

    def note_read_bytes(self, read_bytes: int) -> None:
        """Count what all processes have read so far as progress, if it is as much as a load reads: one look."""
        now = self._clock()
        if now - self._looked_at > _LONGEST_LOOK_S:
            self._progress_at = now
        self._looked_at = now
        self._read_bytes = min(self._read_bytes, read_bytes)  # what a process has read goes with it
        if read_bytes - self._read_bytes >= _LOADS_BYTES_PER_S * self.idle_s:
            self._progress_at, self._read_bytes = self._clock(), read_bytes


# -- phrases and figures

WEIGHTS_LOADED = "weights loaded"
_HEALTH_ANSWER = re.compile(r'"(GET|HEAD) /health HTTP/[\d.]+" 200\b')


def _patterns(section: Mapping[str, str]) -> Iterator[str]:
    return filter(None, section["line"].splitlines())


_LINES = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",), empty_lines_in_values=False)
_LINES.read_string((Path(__file__).parent / "data" / "log.ini").read_text(encoding="utf-8"))
_PATTERNS = [
    (re.compile(pattern), _LINES[name].get("phrase", name))
    for name in _LINES.sections()
    if name != "figures"
    for pattern in _patterns(_LINES[name])
]
PHRASES = frozenset(text for _, text in _PATTERNS)
_FIGURES = [re.compile(re.sub(r"<(\w+)>", r"(?P<\1>-?[\\d.,]+)", pattern)) for pattern in _patterns(_LINES["figures"])]


@dataclass(frozen=True)
class StartPhrase:
    """A phrase about a start, and how much of it is done where the engine says so."""

    text: str
    done: int | None = None
    total: int | None = None


def read_phrase(line: str) -> StartPhrase | None:
    """Return the phrase for what `line` tells of a start, or None.

    >>> read_phrase("Loading safetensors checkpoint shards:   1% Completed | 2/191 [00:09<15:58,  5.07s/it]")
    StartPhrase(text='loading weights', done=2, total=191)
    """
    for pattern, text in _PATTERNS:
        if found := pattern.search(line):
            return StartPhrase(text, *map(int, found.groups()))
    return None


def read_figures(line: str) -> dict[str, float]:
    """Return the figures in `line`, by the names that the planner uses; empty for a line without any.

    Names: checkpoint_bytes, model_loading_bytes, kv_cache_bytes, kv_cache_tokens, max_concurrency, max_model_len,
    num_blocks, activation_bytes, non_torch_bytes, consumed_bytes, cuda_graph_bytes, cuda_graph_estimate_bytes,
    loading_weights_s, init_engine_s. vLLM prints GiB with two digits, so sizes are good to 10 MiB.

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
    """Return whether `line` is vLLM's report that no request runs or waits, and that hardly a token came or went."""
    report = read_report(line)
    if report is None or report.running or report.waiting:
        return False
    return max(report.prompt_tokens_per_s, report.generation_tokens_per_s) <= _IDLE_TOKENS_PER_S


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
