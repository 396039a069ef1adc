"""The metrics of engines: asked here for people, or by a Prometheus that is told here whom to ask and how.

`WorkWatch` says what each engine does: requests, tokens a second, use of the cache. Tokens a second are the difference
of two looks. Whether a replica is ready is not decided here.

Prometheus gets a list of targets (file_sd). A service's key goes to its own replicas alone, over TLS, to whoever shows
a certificate of the home's authority.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_serve.background import in_background
from hpc_serve.client.replicas.probe import PROBE_TIMEOUT_S
from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, error_text
from hpc_serve.printable import printable
from hpc_serve.trust.connection import Identity, VerifiedConnection
from hpc_serve.vllm.metrics import EngineWork, read_work

# -- for Prometheus

_SERVICE_LABEL = "service"
_SCRAPED = ("ready", "draining", "unresponsive")
_ADDRESS = re.compile(r"[\w.-]+:[0-9]+|\[[0-9a-fA-F:.]+\]:[0-9]+")


def target_groups(statuses: Iterable[ReplicaStatus]) -> tuple[list[dict[str, Any]], list[str]]:
    """The replicas as file_sd has them, in a fixed order; and why others that serve are left out."""
    groups, problems = [], []
    for status in sorted(statuses, key=lambda one: (one.service, one.job_id, one.replica)):
        if status.state not in _SCRAPED or not status.address:
            continue
        if not _ADDRESS.fullmatch(status.address):
            problems.append(f"{status.service} (job {status.name}) is left out: {status.address} is no address.")
        else:
            groups.append({"targets": [status.address], "labels": _labels(status)})
    return groups, problems


def scrape_config(services: Iterable[tuple[str, Path]], *, targets_file: Path, authority_file: Path) -> str:
    """The part of prometheus.yml for services, each with the file of its key.

    A job of Prometheus has one key, so there is one for each service, which keeps that service's targets alone.
    """
    import yaml  # it takes a while, and the list of targets needs none

    jobs = [
        {
            "job_name": f"hpc-serve-{service}",
            "scheme": "https",
            "follow_redirects": False,
            "authorization": {"credentials_file": str(key_file)},
            "tls_config": {"ca_file": str(authority_file)},
            "file_sd_configs": [{"files": [str(targets_file)]}],
            "relabel_configs": [{"source_labels": [_SERVICE_LABEL], "regex": re.escape(service), "action": "keep"}],
        }
        for service, key_file in services
    ]
    return yaml.safe_dump({"scrape_configs": jobs}, sort_keys=False, width=10_000)


def _labels(status: ReplicaStatus) -> dict[str, str]:
    labels = {
        _SERVICE_LABEL: status.service,
        "slurm_job": status.job_id,
        "replica": status.name,
        "node": status.record.nodes[0].name if status.record and status.record.nodes else "",
        "model": status.job.model,
    }
    return {name: value for name, value in labels.items() if value}


# -- what engines do

LOOK_S = 1.0  # between the two looks at an engine that tell how fast it is
_MOST_BYTES = 8 << 20
_READ_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ReplicaWork:
    """What the engine of a replica does. Of an engine that could not be asked, `problem` says why.

    The rates are tokens a second over the last `over_s` seconds; None: there is one look so far. `now.running` is of
    the same seconds: the most of both looks, and 1 at least where tokens were generated between them.
    """

    now: EngineWork = field(default_factory=EngineWork)
    over_s: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    problem: str = ""

    @property
    def is_known(self) -> bool:
        return self.now != EngineWork()


class WorkWatch:
    """Looks at the engines of replicas, and remembers the last look at each. For one thread at a time."""

    def __init__(
        self,
        read_api_key: Callable[[str], str],
        *,
        timeout_s: float = PROBE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_api_key = read_api_key
        self._timeout_s = timeout_s
        self._clock = clock
        self._last: dict[tuple[str, ...], tuple[EngineWork, float]] = {}

    def look(self, statuses: Sequence[ReplicaStatus]) -> list[ReplicaWork]:
        """What each of the replicas does now, in their order. All are asked at the same time."""

        def ask(status: ReplicaStatus, api_key: str) -> tuple[EngineWork | str, float]:
            return _ask(status, api_key, self._timeout_s), self._clock()

        found = [ReplicaWork(problem=_why_not(status)) for status in statuses]
        asked: dict[int, Future[tuple[EngineWork | str, float]]] = {}
        for place, status in enumerate(statuses):
            if not found[place].problem:
                try:
                    asked[place] = in_background(ask, status, self._read_api_key(status.service))
                except HpcServeError as error:
                    found[place] = ReplicaWork(problem=str(error))
        wait(asked.values(), 2 * self._timeout_s)  # connecting, the proof and reading may each take `timeout_s`
        for place, answer in asked.items():
            late = "its engine's /metrics did not answer in time", 0.0
            found[place] = self._noted(statuses[place], *(answer.result() if answer.done() else late))
        self._last = {key: self._last[key] for key in map(_key, statuses) if key in self._last}
        return found

    def _noted(self, status: ReplicaStatus, answer: EngineWork | str, at_s: float) -> ReplicaWork:
        if isinstance(answer, str):
            return ReplicaWork(problem=answer)
        last, last_at_s = self._last.get(_key(status), (answer, at_s))
        self._last[_key(status)] = answer, at_s
        over_s = at_s - last_at_s
        if over_s <= 0:
            return ReplicaWork(now=answer)
        generated = _rate(last.generation_tokens, answer.generation_tokens, over_s)
        if answer.running is not None:
            most = max(answer.running, last.running or 0, 1 if generated else 0)
            answer = replace(answer, running=most)
        return ReplicaWork(
            now=answer,
            over_s=over_s,
            prompt_tokens_per_s=_rate(last.prompt_tokens, answer.prompt_tokens, over_s),
            generation_tokens_per_s=generated,
        )


def _why_not(status: ReplicaStatus) -> str:
    if status.state not in ("ready", "draining"):
        return f"it is {status.state}"
    return "" if status.record is not None and status.host is not None else "it has no record with an address"


def _key(status: ReplicaStatus) -> tuple[str, ...]:
    """One engine: one that was started again in place has another port, and counts anew."""
    return (status.service, status.name, str(status.restart), status.address)


def _rate(before: float | None, now: float | None, over_s: float) -> float | None:
    """None if it is not counted, or was counted anew."""
    return None if before is None or now is None or now < before else (now - before) / over_s


def _ask(status: ReplicaStatus, api_key: str, timeout_s: float) -> EngineWork | str:
    """What the engine says, or why it says nothing."""
    assert status.record is not None
    assert status.host is not None
    try:
        identity = Identity.of(status.record, api_key)
        with contextlib.closing(
            VerifiedConnection(status.host, status.record.port, identity, timeout_s=timeout_s)
        ) as connection:
            response = connection.ask("GET", "/metrics")
            if response.status != 200:
                return f"its engine answers /metrics with {response.status}"
            text = _read(response, time.monotonic() + timeout_s)
    except (OSError, http.client.HTTPException, ValueError, HpcServeError) as error:
        return printable(f"its engine's /metrics did not answer: {error_text(error)}")
    work = read_work(text)
    return "its engine's /metrics has no figures of vLLM" if work == EngineWork() else work


def _read(response: http.client.HTTPResponse, ends_at_s: float) -> str:
    content = b""
    while piece := response.read1(_READ_BYTES):
        content += piece
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES >> 20} MiB")
        if time.monotonic() > ends_at_s:
            raise TimeoutError("it takes too long")
    return content.decode(errors="replace")


def look_for(statuses: Sequence[ReplicaStatus], read_api_key: Callable[[str], str]) -> list[ReplicaWork]:
    """What each replica does. Where one has requests, all are looked at twice, LOOK_S apart, for the rates."""
    watch = WorkWatch(read_api_key)
    found = watch.look(statuses)
    if any(work.now.requests for work in found):
        time.sleep(LOOK_S)
        found = watch.look(statuses)
    return found
