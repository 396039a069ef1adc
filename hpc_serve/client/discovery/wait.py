"""How long to wait for a service that is coming, and which error ends the wait."""

from __future__ import annotations

import functools
import math
import numbers
import time
from collections.abc import Callable, Sequence

from hpc_serve.client.discovery.discovery import ServiceWatch, discover_services
from hpc_serve.client.replicas.event_loops import InLoop, InThread
from hpc_serve.client.replicas.status import ServiceStatus, not_found, summary
from hpc_serve.errors import InvalidRequestError, ServiceFailedError, ServiceNotFoundError, StoreError, WaitTimeoutError

# A shared filesystem may hide a new file while its attribute cache is valid. "There is none" is believed after this.
ABSENT_GRACE_S = 30.0
STEP_S = 1.0
# While a replica starts: its record says at once that it is ready, and whoever waits shall have it soon after.
STARTING_STEP_S = 0.4

Wait = float | bool | None


class WaitPolicy:
    """One wait: `wait` seconds, as long as a replica is coming (True), or not at all (None, False)."""

    def __init__(self, wait: Wait, *, clock: Callable[[], float] = time.monotonic) -> None:
        if wait is not None and (not isinstance(wait, numbers.Real) or not wait >= 0):
            raise InvalidRequestError(f"wait is {wait!r}: give seconds (600), True for as long as it takes, or None.")
        self._clock = clock
        self._wait_s = 0.0 if not wait else math.inf if wait is True else float(wait)
        self._since_s = self._absent_since_s = clock()
        self._was_coming = False
        self._unreadable_since_s: float | None = None

    @property
    def waits(self) -> bool:
        return self._wait_s > 0

    def next_step_s(self, status: ServiceStatus, list_services: Callable[[], Sequence[ServiceStatus]]) -> float:
        """Seconds until a service without a ready replica should be looked at again.

        `list_services` is called only for an error that names the other services. Raises ServiceNotFoundError (no
        replica, and none is coming), ServiceFailedError (it failed on the way) or WaitTimeoutError.
        """
        self._unreadable_since_s = None
        if not self.waits:
            raise ServiceNotFoundError(not_found(status, list_services()))
        waited_s, absent_s = self._clock() - self._since_s, self._clock() - self._absent_since_s
        if not status.is_coming and (self._was_coming or absent_s >= min(ABSENT_GRACE_S, self._wait_s)):
            if status.newest_failure is not None:
                raise ServiceFailedError(
                    f"{status.service} {summary(status)}. See more: hpc-serve logs {status.service}"
                )
            raise ServiceNotFoundError(not_found(status, list_services()))
        self._was_coming = self._was_coming or status.is_coming
        if waited_s >= self._wait_s:
            raise WaitTimeoutError(
                f"{status.service} was not ready after {waited_s:.0f} s: {summary(status)}. It may still become "
                f"ready: wait longer, or see what it does: hpc-serve logs {status.service}"
            )
        is_starting = any(replica.state == "starting" for replica in status.replicas)
        step_s = min(STEP_S, STARTING_STEP_S) if is_starting else STEP_S
        return min(step_s, self._wait_s - waited_s)

    def expect(self) -> None:
        """The service was woken, or is being submitted: its job may be seen later. What was seen before is not held
        against it."""
        self._absent_since_s = self._clock()
        self._was_coming = False

    def step_after_s(self, error: StoreError) -> float:
        """Seconds until a store that could not be read should be read again. Raises the error if it stays so."""
        now_s = self._clock()
        if self._unreadable_since_s is None:
            self._unreadable_since_s = now_s
        left_s = min(self._unreadable_since_s + ABSENT_GRACE_S, self._since_s + self._wait_s) - now_s
        if not self.waits or left_s <= 0 or not _may_pass(error):
            raise error
        return min(STEP_S, left_s)


def _may_pass(error: StoreError) -> bool:
    """Whether the filesystem caused it, and not what is in the store."""
    return isinstance(error.__cause__ or error.__context__, OSError)


def _may_sleep(status: ServiceStatus) -> bool:
    """Whether nothing is known to come but jobs that published nothing, which may have ended."""
    return all(replica.state == "pending" for replica in status.replicas if replica.is_coming)


async def wait_for_replica(watch: ServiceWatch, policy: WaitPolicy, here: InThread | InLoop) -> None:
    """Return once a usable replica is known; a service that is asleep is woken, if the watch's `waker` may.

    `here` is how it waits. Raises what WaitPolicy.next_step_s raises, ServiceAsleepError and StoreError.
    """
    while not watch.pool:
        try:
            if await here.call(watch.find_one):
                return
            status = await here.call(watch.refresh)
            wake = functools.partial(watch.waker.wake_if_asleep, is_pending=status.is_coming)
            if not status.usable and _may_sleep(status) and await here.call(wake):
                policy.expect()
                status = await here.call(watch.refresh)  # waking may take longer than the wait: its jobs are told then
        except StoreError as error:
            await here.sleep(policy.step_after_s(error))
            continue
        if status.usable:
            return
        await here.sleep(await here.call(policy.next_step_s, status, lambda: discover_services(watch.store)))
