"""A run as values: its requests, their pace, their results, and what the plan predicts of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dataset = Literal["random", "chat", "prefix_repetition", "custom", "sharegpt", "burstgpt"]
Split = Literal["client", "equally"]


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
class OwnShare:
    """How busy the program that measures was: the share of the time that its busiest event loop worked, and how late it
    woke in the worst of twenty times (seconds)."""

    busy: float
    late_s: float


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The results of a run's requests. If it was `interrupted`, `outcomes` lacks requests without an answer by then."""

    outcomes: tuple[RequestResult, ...]
    duration_s: float
    own_share: OwnShare
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class Run(Sent):
    """One run: its service, its requests, their pace, and their results.

    `replicas` were ready when the run began. `requests` are all requests to be sent.
    """

    service: str
    model: str
    workload: str
    requests: tuple[BenchRequest, ...]
    pace: Pace
    split: Split
    replicas: tuple[str, ...]
    date: str = ""

    @property
    def load(self) -> float:
        """How many requests come: per second at a rate, else at once."""
        return self.pace.request_rate if self.pace.is_rate else float(self.pace.max_concurrency or len(self.requests))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The plan's prediction of a run: tokens per second of all replicas together, milliseconds of one request.

    If there are no figures, `reason` says why.
    """

    output_rate: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    reason: str = ""

    def keys(self) -> dict[str, float | str | None]:
        """Return it under the keys of what is measured."""
        if self.reason:
            return {"reason": self.reason}
        return {"output_throughput": self.output_rate, "mean_ttft_ms": self.ttft_ms, "mean_tpot_ms": self.tpot_ms}
