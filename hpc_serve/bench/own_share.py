"""Watches this program while it measures: how busy its event loop is, and how late it wakes.

A loop without time left stamps what comes late, and takes that for the service's time. `notes` decides how much is too
much.
"""

from __future__ import annotations

import asyncio
import time

from hpc_serve.bench.figures import percentile
from hpc_serve.bench.outcome import OwnShare

STEP_S = 0.05


class OwnShareMeter:
    """Measures the event loop that runs, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()
        self._sleep()

    def stop(self) -> OwnShare:
        if self._timer is not None:
            self._timer.cancel()
        took_s = max(time.perf_counter() - self._began_s, 1e-9)
        busy = (time.thread_time() - self._began_cpu_s) / took_s
        return OwnShare(busy=min(busy, 1.0), late_s=percentile(sorted(self._late_s) or [0.0], 95))

    def _sleep(self) -> None:
        due_s = self._loop.time() + STEP_S
        self._timer = self._loop.call_at(due_s, self._wake, due_s)

    def _wake(self, due_s: float) -> None:
        self._late_s.append(max(0.0, self._loop.time() - due_s))
        self._sleep()
