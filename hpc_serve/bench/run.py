"""A run as values: its requests, their pace, and the result of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dataset = Literal["random", "chat", "prefix_repetition", "custom", "sharegpt"]
Split = Literal["client", "equally"]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each prompt and of each answer."""

    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How requests come: at a rate (requests/s; inf: all at once), so many under way at most (None: no bound)."""

    max_concurrency: int | None
    request_rate: float = math.inf
    burstiness: float = 1.0

    @property
    def is_rate(self) -> bool:
        return not math.isinf(self.request_rate)

    def __str__(self) -> str:
        """Return it in few words.

        >>> str(Pace(max_concurrency=64)), str(Pace(max_concurrency=64, request_rate=4))
        ('64 at once', '4/s, 64 at once at most')
        >>> str(Pace(max_concurrency=None)), str(Pace(max_concurrency=None, request_rate=2.5))
        ('all at once', '2.5/s')
        """
        at_once = "all at once" if self.max_concurrency is None else f"{self.max_concurrency} at once"
        if not self.is_rate:
            return at_once
        return f"{self.request_rate:g}/s" + ("" if self.max_concurrency is None else f", {at_once} at most")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request: its path, and its body without model and stream. Lengths in tokens; `input_len` None: not known."""

    path: str
    body: Mapping[str, Any]
    input_len: int | None
    output_len: int


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    """The result of a request. Times are in seconds; `start_s` is by a clock that counts from no known moment.

    `latency_s` ends with the last token, and `itls_s` are the times between the pieces of the answer. `queue_s` is the
    wait here for its turn. `replica` has answered, "" if none did; the request was sent `sent` times. If `error` is
    empty, it was answered.
    """

    place: int
    input_len: int
    output_len: int = 0
    ttft_s: float = 0.0
    itls_s: tuple[float, ...] = ()
    latency_s: float = 0.0
    start_s: float = 0.0
    queue_s: float = 0.0
    text: str = ""
    error: str = ""
    replica: str = ""
    sent: int = 1

    @property
    def is_answered(self) -> bool:
        return not self.error


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its service, its requests, their pace, and their results, which are empty before it.

    `replicas` were ready when the run began. `requests` are all requests to be sent. If it was `interrupted`,
    `outcomes` lacks requests without an answer by then. `busy` is the share of the time that this program's event loop
    worked, and `late_s` how late it woke in the worst of twenty times. The engines generated `others_tokens` tokens for
    other requests meanwhile, by their own counters. Where one of them is on this node, programs waited for a core here
    the share `waited` of the time. None: not known. `vllm` is the engines' version, "" if they do not say.
    """

    service: str
    model: str
    workload: str
    requests: tuple[BenchRequest, ...]
    pace: Pace
    split: Split
    replicas: tuple[str, ...]
    date: str
    outcomes: tuple[RequestResult, ...] = ()
    duration_s: float = 0.0
    busy: float = 0.0
    late_s: float = 0.0
    others_tokens: float | None = None
    waited: float | None = None
    vllm: str = ""

    @property
    def interrupted(self) -> bool:
        return len(self.outcomes) < len(self.requests)
