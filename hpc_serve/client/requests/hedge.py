"""A second request beside the first: the same one, at another replica, while the network to the first loses packets.

A whole answer that is given up begins anew elsewhere, and its user has waited for nothing. So another replica is asked
before the first one is given up, and the first answer of the two is taken; the other request is cancelled, which ends
it at its engine. Requests that leave nothing behind only, once each, and few at a time: what engines do twice is lost
to others. (J. Dean and L. A. Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: "hedged requests".)

The second request has a thread and a connection of its own, for asyncio and trio, too: it is seldom needed, and costs
nothing where it is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hpc_serve.client.connections.connections import Origins, make_transport
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.probe import in_background
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import Attempt

_log = logging.getLogger("hpc_serve.client")


class SecondRequest:
    """One request that is asked for a second time. Its answer counts if it is there before the first one's.

    `attempt` is where; `origins` is this request's own. `failure` is why no answer came. `is_waited_for`: the first one
    has failed.
    """

    def __init__(self, first: Attempt, attempt: Attempt, origins: Origins) -> None:
        self._first = first
        self._attempt = attempt
        self._origins = origins
        self._is_over = threading.Event()
        self._is_cancelled = False
        self._response: http.Response | None = None
        self.failure: BaseException | None = None
        self.is_waited_for = False

    @property
    def replica(self) -> ReplicaAddress:
        return self._attempt.replica

    def begin(self, request: http.Request, cut_first: Callable[[], None]) -> None:
        """Send it. `cut_first` is called when its answer has come before the first one's. Raises RuntimeError."""
        _log.debug("%s is asked beside %s", self.replica.name, self._first.replica.name)
        try:
            in_background(self._run, request, cut_first)
        except RuntimeError:  # no more threads for this user
            self._attempt.end()
            self._is_over.set()
            raise

    def cancel(self) -> None:
        """Its answer is not wanted any more. May be called from any thread, and more than once."""
        self._is_cancelled = True
        self._origins.end()

    def wait(self) -> http.Response | None:
        """Wait for its end: its response, None if the first one's came before, or it failed."""
        self._is_over.wait()
        return self._response

    def _run(self, request: http.Request, cut_first: Callable[[], None]) -> None:
        try:
            response = self._fetch(request)
            if response is not None and not self._is_cancelled and self._first.claim_answer():
                self._response = response
                cut_first()
        except Exception as error:
            if not self._is_cancelled:  # else it is not the replica's failure
                self.failure = self._attempt.end_with(error)
        finally:
            self._attempt.end()
            self._is_over.set()

    def _fetch(self, request: http.Request) -> http.Response | None:
        """The whole response; None if it is no answer. Of an error the first request is the judge."""
        with make_transport(self._origins) as transport:
            response = transport.handle_request(request)
            try:
                if response.status_code != 200:
                    return None
                self._attempt.answered(response)
                stream = response.stream
                assert isinstance(stream, http.SyncByteStream)
                content = b"".join(stream)
            finally:
                response.close()
        return http.Response(200, headers=response.headers, stream=http.ByteStream(content))
