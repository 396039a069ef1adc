"""The stages of a start, with the time that each takes, and how long it takes until the replica is ready.

Pure: `job/run/record_keeper.py` tells it each phrase of the launcher or the engine, and what is read. The last start of
the same tells how long a stage takes; the weights, once some are loaded, tell it themselves (`load_progress`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hpc_serve.job.progress.load_progress import LoadProgress, WeightsRead
from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.rendezvous.record import START_STAGES, EndpointRecord, StartRecord
from hpc_serve.rendezvous.start_times import PastStart, cache_of, layout_of
from hpc_serve.sizes import MIB

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
"""The stage that a phrase belongs to. Those that engines say at different places belong to none."""

_LEAST_READ_BYTES = 64 * MIB
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
        self._load, self._copy = LoadProgress(clock()), LoadProgress(clock())
        self._read = WeightsRead()
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
        return max(past if past >= _LEAST_READ_BYTES else 0, self.checkpoint_bytes or 0)

    def _bytes_per_s(self) -> float | None:
        """Return how fast the weights are loaded, or were; while the model is staged, how fast it is copied."""
        if self._stage == "staging":
            done, total = self._copied
            return done / self._elapsed_s() if MIB <= done < total and self._elapsed_s() > 0 else None
        size = self.checkpoint_bytes or self._read.total
        if took_s := self._took_s.get("weights"):
            return size / took_s if size >= _LEAST_READ_BYTES else None
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
