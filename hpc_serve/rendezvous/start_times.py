"""What the starts of each model took in this home: one small file, so that the next start can say how long it takes.

The head of a replica writes it once the replica is ready, and reads it when the next one begins. It is a help and no
more: a file that is damaged counts as none, and of two heads that write at once one entry is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.fields import Timestamp, from_json_text, to_json_text
from hpc_serve.rendezvous.files import read_private, write_private
from hpc_serve.rendezvous.record import START_STAGES, EndpointRecord
from hpc_serve.sizes import MIB

FILE = "start_times.json"
MOST_STARTS = 50
_LONGEST_S = 30 * 24 * 3600.0
# torch, vLLM and what they import are 1 GiB and more; a start that finds them in the page cache reads some MiB.
_PROGRAMS_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class PastStage:
    """A stage of a start that is over: what it took, and how many seconds after its begin each mark was seen.

    A mark is a place in vLLM's source that logged something (`core.py:133`). `disk_bytes` came from disks, by what the
    kernel says of all nodes; None: not looked at.
    """

    name: str
    took_s: float
    marks: Mapping[str, float] = field(default_factory=dict)
    disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PastStart:
    """A start that became ready at `ready_at`. `read_bytes` is what all nodes read in the stage of its weights.

    `cache` is "warm" where the engine found compiled code, "cold" where it did not.
    """

    service: str
    model: str
    layout: str
    ready_at: Timestamp
    stages: tuple[PastStage, ...]
    read_bytes: int = 0
    cache: str = ""

    @property
    def took_s(self) -> Mapping[str, float]:
        """The seconds of each stage."""
        return {stage.name: stage.took_s for stage in self.stages}

    @property
    def is_from_disk(self) -> bool | None:
        """Whether the engine's programs came from a disk, not from the page cache; None: not known."""
        read = self.disk_bytes("engine")
        return None if read is None else is_from_disk(read)

    def disk_bytes(self, stage: str) -> int | None:
        """What came from disks in a stage; None: not known."""
        return next((one.disk_bytes for one in self.stages if one.name == stage), None)

    def marks(self, stage: str) -> Mapping[str, float]:
        """The marks of a stage."""
        return next((one.marks for one in self.stages if one.name == stage), {})


@dataclass(frozen=True, kw_only=True)
class _Starts:
    starts: tuple[PastStart, ...] = ()


def is_from_disk(read_bytes: int) -> bool:
    """Whether so many bytes from disks, until an engine begins with its weights, are those of its programs."""
    return read_bytes >= _PROGRAMS_BYTES


def layout_of(record: EndpointRecord) -> str:
    """On what a replica runs, as far as it decides how long a start takes."""
    layout = f"TP={record.tensor_parallel_size} PP={record.pipeline_parallel_size}"
    stand_in = f" from {record.stand_in}" if record.stand_in else ""
    return f"{record.cluster} {record.num_nodes}x{record.gpus_per_node} {layout}{stand_in}"


def cache_of(record: EndpointRecord) -> str:
    """Whether the caches of an engine are "warm" or "cold"."""
    return record.cache.partition(",")[0]


def last_start(home: Path, record: EndpointRecord) -> PastStart | None:
    """The first of `last_starts`; None if none is known."""
    return next(iter(last_starts(home, record)), None)


def last_starts(home: Path, record: EndpointRecord) -> tuple[PastStart, ...]:
    """The last start of this model in this layout, then the last whose programs came from elsewhere: disk or memory.

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
    likest = sorted(found, key=likeness, reverse=True)
    other = (one for one in likest if one.cache == likest[0].cache and one.is_from_disk == (not likest[0].is_from_disk))
    known = likest[:1] if not likest or likest[0].is_from_disk is None else [likest[0], *list(other)[:1]]
    return tuple(known)


def remember_start(home: Path, start: PastStart) -> None:
    """Write down a start, in the place of the one before of the same service, model, layout, caches and origin of
    programs.

    The MOST_STARTS latest are kept. Raises StoreError, OSError.
    """
    others = [one for one in _read(home) if _key(one) != _key(start)]
    latest = sorted([*others, start], key=lambda one: one.ready_at)[-MOST_STARTS:]
    write_private(home / FILE, to_json_text(_Starts(starts=tuple(latest))))


def _key(start: PastStart) -> tuple[object, ...]:
    return start.service, start.model, start.layout, start.cache, bool(start.is_from_disk)


def _read(home: Path) -> list[PastStart]:
    """What is written down and makes sense."""
    with contextlib.suppress(HpcServeError, OSError):
        path = home / FILE
        return [one for one in from_json_text(_Starts, read_private(path), source=str(path)).starts if _is_sane(one)]
    return []


def _is_sane(start: PastStart) -> bool:
    times = [seconds for stage in start.stages for seconds in (stage.took_s, *stage.marks.values())]
    return {stage.name for stage in start.stages} <= {*START_STAGES} and all(0 <= one <= _LONGEST_S for one in times)
