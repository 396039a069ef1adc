"""How far a start is, and how long it takes until the replica is ready.

`RunReading` counts what the processes of a run have read on one node, in the kernel's three ways. No count is complete:
a mapped file is read without read(), and a file in the page cache without a disk. The kernel counts disks alone, no
network filesystem and no FUSE.

`StartStages` is pure. `run/record_keeper.py` tells it each phrase of the launcher or the engine, and what is read. The
last start of the same service tells how long a stage takes. Once some weights are loaded, the rate of the last seconds
tells the rest: the engine counts files, and the kernel the bytes read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_serve.hub.local_weights import weight_files
from hpc_serve.job.machine.process import marked_pids
from hpc_serve.rendezvous.record import START_STAGES, EndpointRecord, StartRecord
from hpc_serve.rendezvous.start_times import PastStart, cache_of, layout_of
from hpc_serve.units import MIB

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ReadSoFar(NamedTuple):
    """Bytes that came by read(), bytes that came from disks, and bytes of mapped files that came into memory."""

    by_read: int = 0
    from_disk: int = 0
    mapped: int = 0

    def __add__(self, other: ReadSoFar) -> ReadSoFar:  # type: ignore[override]
        return ReadSoFar(*(mine + its for mine, its in zip(self, other)))

    @property
    def total(self) -> int:
        """Return the sum. It shows that something is read, not how much: some bytes count several times."""
        return sum(self)


class RunReading:
    """Looks at the processes of this node with a run's mark, again and again. For one thread at a time."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._mapped_now: dict[int, int] = {}
        self._mapped = 0

    def look(self) -> ReadSoFar:
        """Return the bytes read so far. The first two counts fall when a process has ended."""
        by_read = from_disk = 0
        mapped_now: dict[int, int] = {}
        for pid in marked_pids(self._mark):
            with contextlib.suppress(OSError, ValueError, IndexError):
                folder = Path("/proc") / str(pid)
                counts = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                by_read += int(counts["rchar"])
                from_disk += int(counts["read_bytes"])
                mapped_now[pid] = int((folder / "statm").read_text().split()[2]) * _PAGE_BYTES
        # It falls where a file is unmapped; what came before stays read.
        self._mapped += sum(max(0, size - self._mapped_now.get(pid, 0)) for pid, size in mapped_now.items())
        self._mapped_now = mapped_now
        return ReadSoFar(by_read=by_read, from_disk=from_disk, mapped=self._mapped)


_RATE_OVER_S = 15.0
_LEAST_PART = 0.02
_LEAST_BYTES = 64 * MIB  # fewer tell nothing
_MOST_SAMPLES = 1_000


class _LoadProgress:
    """The loaded part of the weights, from 0 to 1.

    Finished files count by their `sizes` in bytes, in the engine's order of loading. If `sizes` is empty, all files
    count alike. The bytes read tell the progress of the current file, and the whole progress if the engine counts no
    files.
    """

    def __init__(self, began_s: float) -> None:
        self.sizes: tuple[int, ...] = ()
        self.done = self.total = 0
        self._samples = [(began_s, 0.0)]
        self._read = self._read_at_bar = self._read_at_done = 0

    def begin(self, now: float) -> None:
        """Nothing was loaded until now."""
        if not self.total:
            self._samples = [(now, 0.0)]

    def note_files(self, done: int, total: int, now: float) -> None:
        """Note how many files the engine has loaded."""
        if done < self.done or total != self.total:  # another bar has begun
            self._read = self._read if self.total else 0
            self._samples, self.done, self.total = [(now, 0.0)], 0, total
            self._read_at_bar = self._read_at_done = self._read
        if done > self.done:
            self.done, self._read_at_done = done, self._read
            self._add(now, self._files(done))

    def note_read(self, read_bytes: int, now: float, whole: int) -> None:
        """Note what is read of the weights, of `whole` bytes by all ranks; 0: not known."""
        self._read = max(self._read, read_bytes)
        of_done = self._read_at_done - self._read_at_bar
        if self.done and of_done >= _LEAST_BYTES:
            part = self._files(self.done) * (1 + (self._read - self._read_at_done) / of_done)
        elif whole and not self.done:
            part = (self._read - self._read_at_bar) / whole
        else:
            return
        self._add(now, min(part, self._files(self.done + 1) if self.total else 1.0))

    def rate(self, now: float) -> float | None:
        """Return the part that is loaded in a second, of late; None where too little is known.

        A next sample that is later than those before it lowers the rate.
        """
        reached_s, part = self._samples[-1]
        times = (n for n in reversed(range(len(self._samples))) if reached_s - self._samples[n][0] >= _RATE_OVER_S)
        first = next(times, 0)
        since_s, before = self._samples[first]
        gained, took_s, steps = part - before, reached_s - since_s, len(self._samples) - 1 - first
        if part < _LEAST_PART or not steps:
            return None
        is_between_files = self.done < self.total and part == self._files(self.done)
        step = self._files(self.done + 1) - part if is_between_files else gained / steps
        is_late = now - reached_s > took_s * step / gained
        return gained / max(now - since_s if is_late else took_s, 1e-3)

    def rest_s(self, now: float) -> float | None:
        """Return the seconds until all is loaded; None where too little is known."""
        rate = self.rate(now)
        if rate is None:
            return None
        reached_s, part = self._samples[-1]
        return max((1 - part) / rate - (now - reached_s), 0.0)

    def _files(self, files: int) -> float:
        if len(self.sizes) == self.total and (size := sum(self.sizes)):
            return sum(self.sizes[:files]) / size
        return min(files / self.total, 1.0) if self.total else 0.0

    def _add(self, now: float, part: float) -> None:
        if part > self._samples[-1][1]:
            kept = self._samples if len(self._samples) < _MOST_SAMPLES else self._samples[::2]
            self._samples = [*kept, (now, part)]  # a new list: another thread may look at the old one


class _WeightsRead:
    """The bytes of the weights that the processes of a run have read, in the kernel's three ways of counting."""

    def __init__(self) -> None:
        self._of_weights = ReadSoFar()
        self._latest: ReadSoFar | None = None

    @property
    def total(self) -> int:
        """Bytes; the same bytes may come in several ways, so the way that tells most counts."""
        return max(self._of_weights)

    def begin(self) -> None:
        """Note that the first file is begun: the bytes read until now were the engine's imports."""
        self._of_weights = ReadSoFar()

    def note(self, read: ReadSoFar, *, is_of_weights: bool) -> None:
        """Note a look. A count falls where a process has ended."""
        before, self._latest = self._latest or read, read
        if is_of_weights:
            self._of_weights += ReadSoFar(*(max(0, after - earlier) for earlier, after in zip(before, read)))


_PHRASES: Mapping[str, Sequence[str]] = {
    "nodes": (
        "waiting for the nodes' launchers",
        "looking at the nodes",
        "starting Ray's head",
        "waiting for Ray nodes",
    ),
    "staging": ("staging the model",),
    "engine": ("starting the engine", "waiting for Ray to place the workers"),
    "weights": ("downloading weights", "loading weights"),
    "compile": ("weights loaded", "compiling"),
    "capture": ("profiling", "capturing CUDA graphs"),
    "server": ("server is up", "answering a first request"),
}
STAGE_OF_PHRASE = {phrase: stage for stage, phrases in _PHRASES.items() for phrase in phrases}
"""The stage that a phrase belongs to. A phrase that engines say at different places belongs to none."""
# A stage that takes longer than last time is expected to take this part of its time so far once more.
_OVERDUE = 0.25


class StartStages:
    """One start of a replica, from its `first` stage on. `past` is the last start of the same; None: nothing is known.

    `clock` counts seconds, from anywhere. `checkpoint_bytes` is the size of the weights' files, None: unknown.
    """

    def __init__(
        self, past: PastStart | None = None, *, first: str = "nodes", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._past, self._clock = past, clock
        self._stage, self._began_s = first, {first: clock()}
        self._took_s: dict[str, float] = {}
        self._has_compiled = False
        self._load, self._copy = _LoadProgress(clock()), _LoadProgress(clock())
        self._read = _WeightsRead()
        self._copied = (0, 0)
        self.checkpoint_bytes: int | None = None

    @property
    def is_over(self) -> bool:
        return not self._stage

    def note_phrase(self, phrase: str, done: int | None = None, total: int | None = None) -> bool:
        """Go on to the stage that a phrase belongs to. False: the start is past it, as other ranks have told."""
        stage = STAGE_OF_PHRASE.get(phrase)
        if self.is_over or stage is None:
            return not self.is_over
        if stage == "nodes" and self._stage == "staging":  # Ray starts once the model is there
            return True
        is_further = START_STAGES.index(stage) >= START_STAGES.index(self._stage)
        loads_more = stage == "weights" and self._stage == "compile" and not self._has_compiled
        if not is_further and not (loads_more and done is not None and total is not None and done < total):
            return False
        self._has_compiled = self._has_compiled or phrase == "compiling"
        self._enter(stage)
        if phrase == "loading weights" and done is not None and total is not None:
            if not self._load.total:
                self._read.begin()
            self._load.note_files(done, total, self._clock())
        return True

    def note_read(self, read: ReadSoFar) -> None:
        """Note what the processes of the run have read so far."""
        self._read.note(read, is_of_weights=self._stage == "weights")
        if self._stage == "weights":
            self._load.note_read(self._read.total, self._clock(), self._whole_bytes)

    def note_sizes(self, sizes: Sequence[int]) -> None:
        """Note the bytes of each file of the weights, in the order of loading."""
        self._load.sizes = tuple(sizes)

    def note_copied(self, done: int, total: int) -> None:
        """Note how many bytes of the model are staged, of all. Any thread may call it."""
        self._copied = (done, total)
        self._copy.note_read(done, self._clock(), total)

    def finish(self) -> None:
        """Note that the replica is ready."""
        self._enter("")

    def record(self, now: float) -> StartRecord:
        """Return how far the start is; `now` is the date, in seconds since the epoch."""
        left_s = self.time_left_s()
        weights_left_s = self._load.rest_s(self._clock()) if self._stage == "weights" else None
        return StartRecord(
            stage=self._stage,
            since=max(0.0, now - self._elapsed_s()),
            took_s={name: round(seconds, 2) for name, seconds in self._took_s.items()},
            checkpoint_bytes=self.checkpoint_bytes,
            bytes_per_s=self._bytes_per_s(),
            time_left_s=None if left_s is None else round(left_s, 1),
            weights_left_s=None if weights_left_s is None else round(weights_left_s, 1),
        )

    def past_start(self, record: EndpointRecord, ready_at: float) -> PastStart:
        """This start of a replica, once it is over, for the next one."""
        return PastStart(
            service=record.service,
            model=record.model,
            layout=layout_of(record),
            ready_at=ready_at,
            took_s=dict(self._took_s),
            read_bytes=self._read.total,
            cache=cache_of(record),
        )

    def time_left_s(self) -> float | None:
        """Return the seconds until the replica is ready; None where the last start does not tell."""
        if self.is_over or self._past is None:
            return None
        past_s, stage = self._past.took_s, self._stage
        if stage == "compile" and not self._has_compiled and "compile" not in past_s:
            stage = "capture"
        progress = {"staging": self._copy, "weights": self._load}.get(stage)
        rest_s = progress.rest_s(self._clock()) if progress is not None else None
        if rest_s is None and stage in past_s:
            elapsed_s = self._elapsed_s()
            rest_s = past_s[stage] - elapsed_s if elapsed_s < past_s[stage] else _OVERDUE * elapsed_s
        if rest_s is None:
            return None
        return rest_s + sum(past_s.get(name, 0.0) for name in START_STAGES[START_STAGES.index(stage) + 1 :])

    @property
    def _whole_bytes(self) -> int:
        """Return the bytes that all ranks read for the weights: last time's, else the size; 0: not known."""
        past = self._past.read_bytes if self._past else 0
        return max(past if past >= _LEAST_BYTES else 0, self.checkpoint_bytes or 0)

    def _bytes_per_s(self) -> float | None:
        """Return how fast the weights are loaded, or were; while the model is staged, how fast it is copied."""
        if self._stage == "staging":
            done, total = self._copied
            return done / self._elapsed_s() if MIB <= done < total and self._elapsed_s() > 0 else None
        size = self.checkpoint_bytes or self._read.total
        if took_s := self._took_s.get("weights"):
            return size / took_s if size >= _LEAST_BYTES else None
        rate = self._load.rate(self._clock()) if self._stage == "weights" else None
        return rate * self.checkpoint_bytes if rate and self.checkpoint_bytes else None

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s.get(self._stage, self._clock())

    def _enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        now, before = self._clock(), self._stage
        if before == "compile" and stage == "weights":  # other ranks still load: it goes on where it was
            self._took_s.pop("weights", None)
        elif before == "compile" and not self._has_compiled:  # nothing was compiled: this was profiling already
            self._began_s["capture"] = self._began_s[before]
            if stage != "capture":
                self._took_s["capture"] = now - self._began_s[before]
        else:
            self._took_s[before] = now - self._began_s[before]
        if stage in ("staging", "weights") and stage not in self._began_s:
            (self._copy if stage == "staging" else self._load).begin(now)
        self._stage = stage
        self._began_s.setdefault(stage, now)


def weight_sizes(folder: Path) -> list[int]:
    """Return the sizes of the weights' files in `folder`, in the order of vLLM's loading; none if one is unseen."""
    with contextlib.suppress(OSError):
        files = sorted(weight_files(folder), key=_by_numbers)
        return [size for path in files if (size := path.stat().st_size)]
    return []


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Text by text and numbers by number: part-2 comes before part-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]
