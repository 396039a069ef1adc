"""The durations of each model's starts in this home, in one small file: the next start is estimated from them.

The head of a replica writes it once the replica is ready, and reads it when the next one begins. It is a help and no
more: a file that is damaged counts as none, and of two heads that write at once one entry is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.fields import Timestamp
from hpc_serve.rendezvous.files import read_json, write_json
from hpc_serve.rendezvous.record import START_STAGES, EndpointRecord

FILE = "start_times.json"
MOST_STARTS = 50
_LONGEST_S = 30 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class PastStart:
    """A start that became ready at `ready_at`. `took_s` are the seconds of each stage.

    `read_bytes` is what all nodes read in the stage of its weights. `cache` is "warm" where the engine found compiled
    code, "cold" where it did not.
    """

    service: str
    model: str
    layout: str
    ready_at: Timestamp
    took_s: Mapping[str, float]
    read_bytes: int = 0
    cache: str = ""


@dataclass(frozen=True, kw_only=True)
class _Starts:
    starts: tuple[PastStart, ...] = ()


def layout_of(record: EndpointRecord) -> str:
    """On what a replica runs, as far as it decides how long a start takes."""
    stand_in = f" from {record.stand_in}" if record.stand_in else ""
    return f"{record.cluster} {record.num_nodes}x{record.gpus_per_node} {record.layout}{stand_in}"


def cache_of(record: EndpointRecord) -> str:
    """Return whether the caches of an engine are "warm" or "cold"."""
    return record.cache.partition(",")[0]


def last_start(home: Path, record: EndpointRecord) -> PastStart | None:
    """Return the last start of this model in this layout; None if none is known.

    One with caches that were as warm comes first, then one of the same service. A start with warm caches does not tell
    how long one with cold caches takes, since it compiled nothing; the other way round it is not longer than said.
    """
    cache = cache_of(record)

    def likeness(one: PastStart) -> tuple[bool, bool, float]:
        return one.cache == cache, one.service == record.service, one.ready_at

    found = [
        one
        for one in _read(home)
        if (one.model, one.layout) == (record.model, layout_of(record)) and (one.cache, cache) != ("warm", "cold")
    ]
    return max(found, key=likeness, default=None)


def remember_start(home: Path, start: PastStart) -> None:
    """Write down a start, in the place of the one before of the same service, model, layout and caches.

    The MOST_STARTS latest are kept. Raises StoreError, OSError.
    """
    others = [one for one in _read(home) if _key(one) != _key(start)]
    latest = sorted([*others, start], key=lambda one: one.ready_at)[-MOST_STARTS:]
    write_json(home / FILE, _Starts(starts=tuple(latest)))


def _key(start: PastStart) -> tuple[object, ...]:
    return start.service, start.model, start.layout, start.cache


def _read(home: Path) -> list[PastStart]:
    """Return the starts that are written down and make sense."""
    with contextlib.suppress(HpcServeError, OSError):
        return [one for one in read_json(_Starts, home / FILE).starts if _is_sane(one)]
    return []


def _is_sane(start: PastStart) -> bool:
    return start.took_s.keys() <= {*START_STAGES} and all(0 <= one <= _LONGEST_S for one in start.took_s.values())
