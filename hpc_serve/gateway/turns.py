"""Limits the requests of one service that are under way at once, and the requests that wait for their turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hpc_serve.client.replicas.event_loops import Places
from hpc_serve.gateway.answers import FULL_RETRY_S, Refusal


class Turns:
    """The requests of one service. `in_flight` have their turn, `queued` wait for it or for a replica."""

    def __init__(self, service: str, *, most_in_flight: int, most_queued: int) -> None:
        self._service = service
        self._most_in_flight = most_in_flight
        self._most_queued = most_queued
        self._turns = Places(most_in_flight)
        self.in_flight = 0
        self.queued = 0

    def enter_now(self) -> bool:
        """Give a request of a ready service its turn, until `leave`, if it need not wait for it."""
        if not self._turns.acquire_now():
            return False
        self.in_flight += 1
        return True

    async def enter(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Wait until the service is `ready` and the request has its turn, until `leave`.

        Raises Refusal, and what `ready` raises.
        """
        if self.in_flight + self.queued >= self._most_in_flight + self._most_queued:
            raise self._full()
        self.queued += 1
        try:
            await ready()
            await self._turns.acquire()
        finally:
            self.queued -= 1
        self.in_flight += 1

    def leave(self) -> None:
        """End the turn of a request."""
        self.in_flight -= 1
        self._turns.release()

    def _full(self) -> Refusal:
        return Refusal(
            status=429,
            code="queue_full",
            kind="rate_limit_error",
            message=(
                f"{self._service} has {self.in_flight} requests under way through this gateway (at most"
                f" {self._most_in_flight}) and {self.queued} that wait (at most {self._most_queued}). Try again, or"
                " start the gateway with another --max-in-flight or --queue."
            ),
            headers={"retry-after": str(FULL_RETRY_S)},
        )
