"""Counts for Prometheus. They contain no names of models and no addresses of clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "hpc_serve_gateway_"
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The counters of one gateway. `directory` says what is under way."""

    def __init__(self, directory: Countable) -> None:
        self._registry = registry = CollectorRegistry()
        of_service = ("service",)

        def counter(name: str, words: str, labels: tuple[str, ...] = of_service) -> Counter:
            return Counter(_PREFIX + name, words, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests by the status of their answer; 499: the client left.", ("service", "route", "status")
        )
        self.repeated = counter("repeated", "How often requests were sent again to another replica.")
        self.resumed = counter("resumed", "How often streams went on at another replica.")
        self.broken = counter("broken_streams", "Streams that had begun and could not go on.")
        self.received = counter("received_bytes", "Bytes of the bodies of requests.")
        self.sent = counter("sent_bytes", "Bytes of the bodies of answers.")
        self.waited = Histogram(
            _PREFIX + "wait_seconds",
            "How long requests waited here for their turn or for a replica.",
            of_service,
            buckets=_SECONDS,
            registry=registry,
        )
        self.answered = Histogram(
            _PREFIX + "first_byte_seconds",
            "Seconds between a request's turn and the beginning of its answer.",
            of_service,
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(_UnderWay(directory))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Countable(Protocol):
    """An object with the number of requests in flight and queued, by service."""

    def counts(self) -> Mapping[str, tuple[int, int]]: ...


class _UnderWay(Collector):
    def __init__(self, directory: Countable) -> None:
        self._directory = directory

    def collect(self) -> Iterable[GaugeMetricFamily]:
        in_flight = GaugeMetricFamily(f"{_PREFIX}in_flight", "Requests that have their turn.", labels=["service"])
        queued = GaugeMetricFamily(
            f"{_PREFIX}queued", "Requests that wait for their turn or a replica.", labels=["service"]
        )
        for service, (flying, waiting) in self._directory.counts().items():
            in_flight.add_metric([service], flying)
            queued.add_metric([service], waiting)
        return in_flight, queued
