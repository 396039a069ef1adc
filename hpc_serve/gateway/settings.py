"""The settings of a gateway, as one value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model that is started on demand: the `words` behind `hpc-serve submit`, and the GPUs that it takes."""

    words: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, kw_only=True)
class OnDemand:
    """Models that are started on demand, by service, and the services, GPUs and GPU-hours of a day they may take."""

    models: Mapping[str, ListedModel]
    most_services: float = math.inf
    most_gpus: float = math.inf
    most_gpu_hours: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The gateway serves `services`; if empty, all of the home. `key` is what clients must show; None: nothing.

    Per service, `max_in_flight` requests are with its engines. At most `most_queued` requests wait for their turn or,
    `wait_s` seconds, for a replica. A body has at most `most_body_bytes`, and all bodies held at most
    `most_held_bytes`. Web pages of `origins` may ask. If `wake` is set, a request wakes a service that is asleep.
    Requests to hosts other than the loopback's and `hosts` are refused; None refuses none. A worker of several writes
    its counts into `counts_file`, beside those of the others.
    """

    services: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    wait_s: float = 60.0
    wake: bool = False
    max_in_flight: int = 1000
    most_queued: int = 1000
    most_body_bytes: int = 64 * MIB
    most_held_bytes: int = 1024 * MIB
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = ()
    on_demand: OnDemand | None = None
    counts_file: Path | None = None

    def of_worker(self, number: int, count: int, folder: Path) -> Settings:
        """Return the settings of a worker: it has an equal part of what may be under way."""
        return replace(
            self,
            max_in_flight=max(self.max_in_flight // count, 1),
            most_queued=self.most_queued // count,
            most_held_bytes=max(self.most_held_bytes // count, self.most_body_bytes),
            counts_file=folder / f"{number}.prom",
        )
