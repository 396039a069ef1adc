"""Counts for Prometheus. They contain no names of models and no addresses of clients.

They are plain numbers until somebody asks: the library's own counters cost a tenth of what a request costs.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "hpc_serve_gateway_"
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_COUNTS = {
    "repeated": "How often requests were sent again to another replica.",
    "resumed": "How often streams went on at another replica.",
    "broken_streams": "Streams that had begun and could not go on.",
    "received_bytes": "Bytes of the bodies of requests.",
    "sent_bytes": "Bytes of the bodies of answers.",
}
_TIMES = {
    "wait_seconds": "How long requests waited here for their turn or for a replica.",
    "first_byte_seconds": "Seconds between a request's turn and the beginning of its answer.",
}

_log = logging.getLogger(__name__)


def _text(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


class _Sum(Collector):
    """The sum of what several texts tell; `but` leaves the metrics of one type out."""

    def __init__(self, texts: Iterable[str], *, but: str = "") -> None:
        self._texts, self._but = texts, but

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: defaultdict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                if family.type == self._but:
                    continue
                families[family.name] = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    values[family.name, sample.name, tuple(sample.labels.items())] += sample.value
        for (family_name, name, labels), value in values.items():
            families[family_name].add_sample(name, dict(labels), value)
        return families.values()


class Times:
    """How many times were within each bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def add_to(self, family: HistogramMetricFamily, service: str) -> None:
        bounds = [*map(str, _SECONDS), "+Inf"]
        family.add_metric([service], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)


@dataclass
class Counts:
    """The counts of one service, by the names of their metrics."""

    repeated: int = 0
    resumed: int = 0
    broken_streams: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    wait_seconds: Times = field(default_factory=Times)
    first_byte_seconds: Times = field(default_factory=Times)


class Metrics(Collector):
    """The counts of one gateway. `under_way` returns the number of requests in flight and queued, by service.

    A worker of several writes them into a `file`, and tells the sum of all files of its folder. It goes on counting
    where the worker ended that had the file before: a counter that falls would seem to have begun again.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._problem = ""
        self._before = b""
        if file is not None:
            with suppress(FileNotFoundError):
                self._before = _text(_Sum([file.read_text()], but="gauge"))
        self._services: dict[str, Counts] = {}
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self.under_way: Callable[[], Mapping[str, tuple[int, int]]] = dict

    def of(self, service: str) -> Counts:
        """Return the counts of one service."""
        return self._services.setdefault(service, Counts())

    def count(self, service: str, route: str, status: int) -> None:
        """Count a request that is over."""
        self._requests[service, route, status] += 1

    def text(self) -> bytes:
        if self._file is None:
            return _text(self)
        others = [file.read_text() for file in self._file.parent.glob("*.prom") if file != self._file]
        return _text(_Sum([self._own().decode(), *others]))

    def save(self) -> None:
        """Write the counts for the other workers."""
        if self._file is None:
            return
        new, problem = self._file.with_suffix(".new"), ""
        try:
            new.write_bytes(self._own())
            new.replace(self._file)
        except OSError as error:
            problem = f"{self._file} cannot be written: {error.strerror}. /metrics of other workers lacks its counts."
        if problem != self._problem and problem:
            _log.warning("%s", problem)
        self._problem = problem

    def _own(self) -> bytes:
        return _text(_Sum([self._before.decode(), _text(self).decode()])) if self._before else _text(self)

    def collect(self) -> Iterable[Metric]:
        words = "Requests by the status of their answer; 499: the client left."
        requests = CounterMetricFamily(f"{_PREFIX}requests", words, labels=["service", "route", "status"])
        for (service, route, status), count in self._requests.items():
            requests.add_metric([service, route, str(status)], count)
        yield requests
        for name, words in _COUNTS.items():
            counter = CounterMetricFamily(_PREFIX + name, words, labels=["service"])
            for service, counts in self._services.items():
                counter.add_metric([service], getattr(counts, name))
            yield counter
        for name, words in _TIMES.items():
            histogram = HistogramMetricFamily(_PREFIX + name, words, labels=["service"])
            for service, counts in self._services.items():
                getattr(counts, name).add_to(histogram, service)
            yield histogram
        in_flight = GaugeMetricFamily(f"{_PREFIX}in_flight", "Requests that have their turn.", labels=["service"])
        queued = GaugeMetricFamily(
            f"{_PREFIX}queued", "Requests that wait for their turn or a replica.", labels=["service"]
        )
        for service, (flying, waiting) in self.under_way().items():
            in_flight.add_metric([service], flying)
            queued.add_metric([service], waiting)
        yield from (in_flight, queued)
