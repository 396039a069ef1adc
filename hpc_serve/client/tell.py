"""Tells all ready replicas of a service the same, at once: a request that is balanced reaches one of them.

A program of reinforcement learning pauses all engines, updates their weights and lets them go on. vLLM has these routes
with VLLM_SERVER_DEV_MODE=1 (entrypoints/rl, entrypoints/serve/dev). Requests go over verified connections. A replica's
record has what `/update_weight_version` called its weights.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_serve.background import in_background
from hpc_serve.client.access import open_store
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.replicas import replica_of_file
from hpc_serve.errors import NotAllReplicasError, ServiceNotFoundError
from hpc_serve.rendezvous.shares import named_service
from hpc_serve.trust.connection import VerifiedConnection

_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplicaAnswer:
    """What one replica answered: the HTTP status, None without an answer, and the body or the error as text."""

    status: int | None
    text: str

    @property
    def is_done(self) -> bool:
        """Whether the engine did as it was told."""
        return self.status is not None and 200 <= self.status < 300


def tell_all(
    service: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    undo: str | None = None,
    timeout: float = 600.0,
    home: str | Path | None = None,
) -> dict[str, ReplicaAnswer]:
    """POST the same to every ready replica of a service at once; returns their answers by the replica's name.

    If one does not do it, and `undo` is the path of a request that takes it back, those that did it or gave no answer
    are sent that request. A replica may take `timeout` seconds. Replicas that are not ready are told nothing.

    Raises NotAllReplicasError, whose `answers` say what each replica did, ServiceNotFoundError, StoreError.
    """
    store, name = named_service(service, open_store(home).home)
    watch = ServiceWatch(store, name)
    watch.refresh(is_complete=True)
    replicas = watch.pool.others(frozenset())
    if not replicas:
        raise ServiceNotFoundError(f"{name} has no ready replica to tell: `hpc-serve status {name}` says why.")
    answers = _tell(replicas, path, body, timeout)
    failed = {one: answer for one, answer in answers.items() if not answer.is_done}
    if not failed:
        return answers
    told = "; ".join(f"{one}: {answer.status or 'no answer'} {answer.text[:200]}" for one, answer in failed.items())
    done = [one for one in replicas if (answer := answers[replica_of_file(one.name)]).is_done or answer.status is None]
    no_route = any(answer.status == 404 for answer in failed.values())
    more = " vLLM has most such routes in development mode alone: `--env VLLM_SERVER_DEV_MODE=1`." if no_route else ""
    if undo is not None and done:
        back = _tell(done, undo, None, timeout)
        left = [one for one, answer in back.items() if not answer.is_done]
        more += f" {undo} was sent to those that did it or gave no answer"
        more += f"; it failed at {', '.join(left)}." if left else "."
    raise NotAllReplicasError(
        f"{len(failed)} of {len(replicas)} replicas of {name} did not do POST {path}: {told}.{more}",
        answers=answers,
    )


def _tell(
    replicas: list[ReplicaAddress], path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> dict[str, ReplicaAnswer]:
    told = {replica_of_file(one.name): in_background(_ask, one, path, body, timeout_s) for one in replicas}
    return {name: answer.result() for name, answer in told.items()}


def _ask(replica: ReplicaAddress, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> ReplicaAnswer:
    headers = {"Authorization": f"Bearer {replica.identity.api_key}", "Content-Type": "application/json"}
    connection = VerifiedConnection(replica.host, replica.port, replica.identity, timeout_s=_CONNECT_S)
    try:
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request("POST", path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return ReplicaAnswer(status=response.status, text=response.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        return ReplicaAnswer(status=None, text=str(error) or type(error).__name__)
