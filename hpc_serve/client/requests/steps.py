"""What `exchange` asks a transport to do: each step waits for something, and its answer is sent back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from hpc_serve.client.discovery.wait import WaitPolicy
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import Attempt


@dataclass(frozen=True)
class Send:
    """Send a request; the answer is a response whose body was not read."""

    request: http.Request
    attempt: Attempt


@dataclass(frozen=True)
class Fetch:
    """Send a request; the answer is the whole body of its response."""

    request: http.Request


@dataclass(frozen=True)
class Call:
    """Call a function that waits for files or probes; the answer is what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class WaitForReplica:
    """Wait until a replica is ready, as long as the policy says."""

    policy: WaitPolicy


@dataclass(frozen=True)
class Read:
    """Read a response to its end and close it; the answer is its bytes."""

    response: http.Response


@dataclass(frozen=True)
class Close:
    """Close a response."""

    response: http.Response


Step = Send | Fetch | Call | WaitForReplica | Read | Close
T = TypeVar("T")
Steps = Generator[Step, Any, T]
