"""The requests of a run and their results: values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["client", "equally"]


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

    `max_concurrency` None: no bound; `request_rate` inf: all at once, within that bound. `replicas` were ready when the
    run began. `requests` are all requests to be sent.
    """

    service: str
    model: str
    workload: str
    requests: tuple[BenchRequest, ...]
    max_concurrency: int | None
    request_rate: float
    burstiness: float
    split: Split
    replicas: tuple[str, ...]
    date: str = ""
