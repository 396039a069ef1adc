"""What makes tests of clients independent of how busy their machine is.

A client does several things after a second or two: it gives up a probe, a connection, a replica that is silent. On a
busy machine a living stub may take longer. Tests that are not about these times use `be_patient`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpc_serve.client import connect
from hpc_serve.client.discovery import discovery, reading
from hpc_serve.client.engine_work import WorkWatch
from hpc_serve.client.replicas import pool, probe, silence
from hpc_serve.client.requests import exchange
from hpc_serve.job.engine import health
from tests.support.stubs import StubService

PATIENCE_S = 60.0


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client waits for a living engine, takes no silence for an end, and equal replicas are equally fast for it."""
    for module, name in (
        (discovery, "PROBE_S"),
        (exchange, "CONNECT_S"),
        (exchange, "LOST_WAIT_S"),
        (reading, "READ_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)
    for function in (probe.probe, probe.probe_record, probe.probe_records, health.read_load, WorkWatch.__init__):
        monkeypatch.setitem(function.__kwdefaults__, "timeout_s", PATIENCE_S)
    monkeypatch.setattr(silence, "SILENT_S", PATIENCE_S)
    monkeypatch.setattr(silence, "MOST_SILENT_S", PATIENCE_S)
    monkeypatch.setattr(pool, "WEIGH_S", math.inf)


def wait_until(condition: Callable[[], object], *, within_s: float = PATIENCE_S) -> None:
    """Return once the condition is true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def connect_to_all(service: StubService, count: int, **options: Any) -> Any:
    """A client that knows so many ready replicas, and looks for no other now.

    `connect` returns with the first replica that answers. On a busy machine it may not have asked the others by then,
    and they are found at the next refresh, which is due with the first request.
    """
    client = connect(service.service, **options)
    client._watch.refresh()
    wait_until(
        lambda: (
            len(client._watch.pool) == count
            and "hpc-serve-background" not in {thread.name for thread in threading.enumerate()}
        )
    )
    return client
