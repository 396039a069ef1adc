"""What an engine's log lines say of its start: the stage it is in, how far, if it moves, and the error that ended it.

The lines are vLLM's (0.6 to 0.32 use these words); one that is not known changes nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

_SHARDS = re.compile(r"(?:checkpoint shards|Loading \w+ checkpoint)\D*\d+% Completed \| (\d+)/(\d+)")
_GRAPHS = re.compile(r"Capturing CUDA graphs?.*?(\d+)/(\d+)")
_STAGES = (
    (re.compile(r"Starting to load model|Loading (?:model )?weights|Loading \w+ checkpoint"), "loading weights"),
    (re.compile(r"Downloading|Time spent downloading"), "downloading weights"),
    (re.compile(r"Using cache directory.*compile|Start compiling|torch\.compile takes|Dynamo bytecode"), "compiling"),
    (re.compile(r"Model loading took|Loading weights took"), "weights loaded"),
    (re.compile(r"GPU KV cache size|# (?:GPU|cuda|CPU) blocks"), "sizing the KV cache"),
    (re.compile(r"Capturing CUDA graph|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"Warming up"), "warming up"),
    (re.compile(r"Waiting for creating a placement group"), "waiting for Ray to place the workers"),
    (re.compile(r"Application startup complete|Starting vLLM server"), "server is up"),
)
_ERROR = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]+\.)*[A-Za-z_]*(?:Error|Exception|Exit|Interrupt)): (.+)")
# How `ray start --block` names the one of its processes that ended.
_RAY_PART = re.compile(r"\b(\w+) \[exit code=(-?\d+)\]")
# Ray's C++ side logs what it retries or merely notes in the same words.
_RAY_LOG = re.compile(r"\b\w+\.cc:\d+")
# What is said again and again while nothing moves: vLLM's complaints, and the answers to our own probes.
_WAITING = re.compile(
    r"No available shared memory broadcast block|Waiting for creating a placement group|\"(?:GET|POST) /\S* HTTP/"
)
# Ray's processes read some hundred bytes a second when nothing happens; the slowest useful load is far from this.
_LOADS_BYTES_PER_S = 1024**2
# vLLM's front end ends with these whatever the cause was.
_CONSEQUENCES = (
    "Engine core initialization failed",
    "EngineCore encountered",
    "EngineDeadError",
    "WorkerProc initialization failed",
)


@dataclass(frozen=True)
class Stage:
    """A short phrase, and how much of it is done where the engine tells."""

    name: str
    done: int | None = None
    total: int | None = None


class Motion:
    """Whether a start moves: by what the engine says, and by how much is read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved_at, self._read_bytes = clock(), 0

    @property
    def idle_s(self) -> float:
        """Seconds since it last moved."""
        return self._clock() - self._moved_at

    def hear(self, line: str) -> None:
        """Take a line of the engine's as a sign of life, unless it only says that it waits."""
        if not _WAITING.search(line):
            self._moved_at = self._clock()

    def see(self, read_bytes: int) -> None:
        """Take what all processes have read so far as a sign of life, if it is as much as a load reads."""
        if read_bytes - self._read_bytes >= _LOADS_BYTES_PER_S * self.idle_s:
            self._moved_at, self._read_bytes = self._clock(), read_bytes


def stage_of(line: str) -> Stage | None:
    """The stage that `line` announces, or None."""
    if shards := _SHARDS.search(line):
        return Stage("loading weights", int(shards[1]), int(shards[2]))
    if graphs := _GRAPHS.search(line):
        return Stage("capturing CUDA graphs", int(graphs[1]), int(graphs[2]))
    return next((Stage(name) for pattern, name in _STAGES if pattern.search(line)), None)


def error_of(line: str) -> str | None:
    """The error that `line` reports ("ValueError: …"), unless it only reports another one's consequence."""
    if part := _RAY_PART.search(line):
        return f"{part[1]} ended with {part[2]}"
    match = _ERROR.search(line)
    if match is None or _RAY_LOG.search(line) or is_consequence(line):
        return None
    return f"{match[1]}: {match[2]}".strip()


def is_consequence(line: str) -> bool:
    """Whether `line` only reports that something else went wrong: better than nothing, if that is all there is."""
    return any(words in line for words in _CONSEQUENCES)
