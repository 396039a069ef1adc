"""How many replicas a service shall have, which job decides it, and what it decided last: one file in its folder.

Several programs change it: the jobs that decide, one at a time, `submit`, `scale`, `stop` and `wake`. Each change is
made under the service's lock, from what the file says at that moment. What is decided, and when, is left to submit/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpc_serve.errors import HpcServeError, RecordError
from hpc_serve.rendezvous.claims import locked
from hpc_serve.rendezvous.fields import Timestamp, from_json_text, to_json_text
from hpc_serve.rendezvous.files import check_folder, read_private, write_private
from hpc_serve.rendezvous.store import ServiceStore

_FILE = "elastic.json"
_MOST_DECISIONS = 5
# sbatch is given a minute, and tries again itself: whoever says for so long that it submits has died.
SUBMITTING_S = 180.0

# asleep: the jobs ended because nobody asked for anything. stopped: a person ended the service.
ElasticState = Literal["awake", "asleep", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided, and why, in words."""

    at: Timestamp
    text: str


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The replicas of a service: `least` to `most`; none after `idle_stop_s` without a request (None: never).

    `decider` is the record of the replica whose job decides. `counter` grows while it is at it: a reader that has seen
    no growth for a while by its own clock may take its place. `submitting` replicas are given to sbatch since
    `submitting_at`. `starting` are jobs that were added and have not been ready. `failures` of such jobs in a row make
    the next try wait until `next_try_at`; `problem` says why. `most_running` requests were seen to run on one replica
    at once. `ending` are jobs that are cancelled because the service falls asleep. `folder` and `variables` are where,
    and with which environment, it was submitted. Times are seconds since the epoch by the clock of who wrote them.
    """

    least: int
    most: int
    idle_stop_s: float | None = None
    state: ElasticState = "awake"
    decider: str = ""
    counter: int = 0
    submitting: int = 0
    submitting_at: Timestamp = 0.0
    starting: tuple[str, ...] = ()
    failures: int = 0
    next_try_at: Timestamp = 0.0
    problem: str = ""
    most_running: int = 0
    decided: tuple[Decision, ...] = ()
    ending: tuple[str, ...] = ()
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def is_submitting(self, now: float) -> bool:
        """Whether somebody gives replicas to sbatch at the moment, or died a moment ago while it did."""
        return self.submitting > 0 and abs(now - self.submitting_at) < SUBMITTING_S

    def with_decision(self, now: float, text: str) -> Elastic:
        return replace(self, decided=(*self.decided, Decision(at=now, text=text))[-_MOST_DECISIONS:])


def elastic_file(store: ServiceStore, service: str) -> Path:
    return store.service_dir(service) / _FILE


def read_elastic(store: ServiceStore, service: str) -> Elastic | None:
    """What is written; None if nothing is, or if the file is damaged. Raises StoreError."""
    path = elastic_file(store, service)
    check_folder(path.parent)
    with contextlib.suppress(FileNotFoundError, RecordError):
        return from_json_text(Elastic, read_private(path), source=str(path))
    return None


def read_elastic_or_none(store: ServiceStore, service: str) -> Elastic | None:
    """What is written as far as it can be read, for those who show it."""
    try:
        return read_elastic(store, service)
    except HpcServeError:
        return None


def change_elastic(
    store: ServiceStore, service: str, change: Callable[[Elastic | None], Elastic | None]
) -> Elastic | None:
    """Replace what is written by what `change` makes of it; None, from `change` too, if nothing shall be changed.

    Of several programs that change at once each sees what the one before wrote. Raises StoreError.
    """
    with locked(store, service):
        found = change(read_elastic(store, service))
        if found is not None:
            write_private(elastic_file(store, service), to_json_text(found))
        return found
