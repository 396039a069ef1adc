"""The counts of a worker: over its end, and where they cannot be written."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("prometheus_client", reason="the gateway needs prometheus_client")
from hpc_serve.gateway.metrics import Metrics


def test_a_worker_goes_on_counting_where_the_one_before_it_ended(tmp_path):
    for _ in range(2):
        metrics = Metrics(tmp_path / "0.prom")
        metrics.under_way = lambda: {"405b": (5, 0)}
        metrics.count("405b", "/v1/completions", 200)
        metrics.of("405b").wait_seconds.observe(0.3)
        metrics.save()
    told = Metrics(tmp_path / "1.prom").text().decode()
    assert 'requests_total{route="/v1/completions",service="405b",status="200"} 2.0' in told
    assert 'wait_seconds_count{service="405b"} 2.0' in told
    assert 'in_flight{service="405b"} 5.0' in told


def test_counts_that_cannot_be_written_are_told_all_the_same(tmp_path, caplog):
    metrics = Metrics(tmp_path / "gone" / "0.prom")
    metrics.count("405b", "/v1/completions", 200)
    with caplog.at_level(logging.WARNING):
        metrics.save()
        metrics.save()
    assert 'status="200"} 1.0' in metrics.text().decode()
    assert len(caplog.messages) == 1
    assert "0.prom cannot be written: No such file or directory." in caplog.messages[0]
