"""How long to wait for a service that is coming, and what to say when it does not come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from hpc_serve.client.discovery import ServiceWatch, discover_services
from hpc_serve.client.views import ServiceView, not_found, summary
from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError, WaitTimeoutError

# A shared filesystem may hide a new file for its attribute cache's time: so long, "none" is not believed.
ABSENT_GRACE_S = 30.0
STEP_S = 1.0

Wait = float | bool | None


class WaitPolicy:
    """One wait: `wait` seconds, as long as a replica is coming (True), or not at all (None, False)."""

    def __init__(self, wait: Wait, *, clock: Callable[[], float] = time.monotonic) -> None:
        if wait is not None and not isinstance(wait, bool) and not wait >= 0:
            raise InvalidRequestError(f"wait is {wait!r}: give seconds (600), True for as long as it takes, or None.")
        self._clock = clock
        self._wait_s = 0.0 if not wait else math.inf if wait is True else float(wait)
        self._since_s = clock()
        self._was_coming = False

    @property
    def waits(self) -> bool:
        return self._wait_s > 0

    def next_step_s(self, view: ServiceView, discover_services: Callable[[], Sequence[ServiceView]]) -> float:
        """Seconds until it is worth looking again at a service that has no live replica.

        `discover_services` is called only for an error that lists the other services. Raises ServiceNotFoundError
        (no replica, and none is coming), ServiceFailedError (it failed on the way) or WaitTimeoutError.
        """
        if not self.waits:
            raise ServiceNotFoundError(not_found(view, discover_services()))
        waited_s = self._clock() - self._since_s
        if not view.is_coming and (self._was_coming or waited_s >= min(ABSENT_GRACE_S, self._wait_s)):
            if view.newest_failure is not None:
                raise ServiceFailedError(f"{view.service} {summary(view)}. See more: hpc-serve logs {view.service}")
            raise ServiceNotFoundError(not_found(view, discover_services()))
        self._was_coming = self._was_coming or view.is_coming
        if waited_s >= self._wait_s:
            raise WaitTimeoutError(
                f"{view.service} was not ready after {waited_s:.0f} s: {summary(view)}. It may still become ready: "
                f"wait longer, or see what it does: hpc-serve logs {view.service}"
            )
        return min(STEP_S, self._wait_s - waited_s)


def wait_for_replica(watch: ServiceWatch, patience: WaitPolicy) -> None:
    """Return once a live replica is known. Raises as WaitPolicy does, and StoreError."""
    while not watch.pool and not (view := watch.look()).live:
        time.sleep(patience.next_step_s(view, lambda: discover_services(watch.store)))


async def wait_for_replica_async(watch: ServiceWatch, patience: WaitPolicy) -> None:
    """The same without blocking the event loop; whoever waits may be cancelled."""
    import anyio
    import anyio.to_thread

    while not watch.pool and not (view := await anyio.to_thread.run_sync(watch.look)).live:
        step_s = await anyio.to_thread.run_sync(patience.next_step_s, view, lambda: discover_services(watch.store))
        await anyio.sleep(step_s)
