"""The stages of a start, with the time that each takes, and how long it takes until the replica is ready.

Pure: told by `job/record_keeper.py` of each phrase of the launcher or the engine, of each line that the engine logs and
of what is read. The arithmetic is in `start_estimate`; what a line says is decided in `vllm.log`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hpc_serve.job.load_progress import LoadProgress, Reading
from hpc_serve.job.reading import ReadSoFar
from hpc_serve.job.start_estimate import expected_pace, expected_weights_s, ratios_of, rest_of_stage
from hpc_serve.rendezvous.record import START_STAGES, StartRecord
from hpc_serve.rendezvous.start_times import PastStage, PastStart, is_from_disk
from hpc_serve.sizes import MIB
from hpc_serve.vllm.log import read_source

STAGE_OF_PHRASE: Mapping[str, str] = {
    "waiting for the nodes' launchers": "nodes",
    "looking at the nodes": "nodes",
    "starting Ray's head": "nodes",
    "waiting for Ray nodes": "nodes",
    "staging the model": "staging",
    "starting the engine": "engine",
    "waiting for Ray to place the workers": "engine",
    "downloading weights": "weights",
    "loading weights": "weights",
    "weights loaded": "compile",
    "compiling": "compile",
    "profiling": "capture",
    "capturing CUDA graphs": "capture",
    "server is up": "server",
    "answering a first request": "server",
}
"""The stage that a phrase belongs to. Those that engines say at different places belong to none."""

_MOST_MARKS = 40
_LEAST_READ_BYTES = 64 * MIB
_MOST_OF_IT = 0.7
# What a rank still imports once it has begun with its weights.
_OTHER_BYTES = 256 * MIB


class StartStages:
    """One start of a replica, from its `first` stage on. `past` is the last start of the same; None: nothing is known.

    `other` is one that found its programs in the page cache where `past` did not, or the other way round. `clock`
    counts seconds, from anywhere. `cached_part` is how much of the weights' files is in the page cache, None: unknown.
    """

    def __init__(
        self,
        past: PastStart | None = None,
        *,
        other: PastStart | None = None,
        first: str = "nodes",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._last, self._other, self._clock = past, other, clock
        self._stage, self._began_s = first, {first: clock()}
        self._took_s: dict[str, float] = {}
        self._marks: dict[str, dict[str, float]] = {}
        self._has_compiled = False
        self._load, self._copy = LoadProgress(clock()), LoadProgress(clock())
        self._reading = Reading()
        self._copied = (0, 0)
        self.checkpoint_bytes: int | None = None
        self.cached_part: float | None = None

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
        if stage == "weights" and phrase == "loading weights" and done is not None and total is not None:
            if not self._load.counts_files:
                self._reading.begin_files()
            self._load.note_files(done, total, self._clock())
        return True

    def note_line(self, line: str) -> None:
        """Remember when the engine first logged from a place in its source."""
        marks = self._marks.setdefault(self._stage, {})
        if not self.is_over and len(marks) < _MOST_MARKS and (source := read_source(line)):
            marks.setdefault(source, self._elapsed_s())

    def note_read(self, read: ReadSoFar) -> None:
        """Note what the processes of the run have read so far."""
        now = self._clock()
        self._reading.note(read, now, self._stage)
        if self._stage == "weights":
            self._load.note_read(self._of_weights, now, self._weights_bytes)

    def note_sizes(self, sizes: Sequence[int]) -> None:
        """Note the bytes of each file of the weights, in the order in which they are loaded."""
        self._load.sizes = tuple(sizes)

    def note_copied(self, done: int, total: int) -> None:
        """Note how many bytes of the model are staged, of all."""
        self._copied = (done, total)
        self._copy.note_read(done, self._clock(), total)

    def finish(self) -> None:
        """The replica is ready."""
        self._enter("")

    def record(self, now: float) -> StartRecord:
        """How far the start is; `now` is the date, in seconds since the epoch."""
        left_s = self.time_left_s()
        weights_left_s = self._weights_left_s() if self._stage == "weights" else None
        return StartRecord(
            stage=self._stage,
            since=max(0.0, now - self._elapsed_s()),
            took_s={name: round(seconds, 2) for name, seconds in self._took_s.items()},
            checkpoint_bytes=self.checkpoint_bytes,
            bytes_per_s=self._bytes_per_s(),
            time_left_s=None if left_s is None else round(left_s, 1),
            weights_left_s=None if weights_left_s is None else round(weights_left_s, 1),
        )

    def past_start(self, *, service: str, model: str, layout: str, ready_at: float, cache: str = "") -> PastStart:
        """This start, once it is over, for the next one."""
        return PastStart(
            service=service,
            model=model,
            layout=layout,
            ready_at=ready_at,
            stages=tuple(
                PastStage(
                    name=name,
                    took_s=seconds,
                    marks=self._marks.get(name, {}),
                    disk_bytes=self._reading.disk_bytes.get(name),
                )
                for name, seconds in self._took_s.items()
            ),
            read_bytes=self._reading.weights_bytes,
            cache=cache,
        )

    def time_left_s(self) -> float | None:
        """Seconds until the replica is ready; None where the last start does not tell."""
        if self.is_over or self._past is None:
            return None
        past_s = self._past.took_s
        stage = self._stage
        if stage == "compile" and not self._has_compiled and "compile" not in past_s:
            stage = "capture"
        if stage == "staging":
            staging_s = self._copy.rest_s(self._clock(), None)
            later_s = sum(past_s.get(name, 0.0) for name in START_STAGES[START_STAGES.index(stage) + 1 :])
            return None if staging_s is None else staging_s + later_s
        if stage not in past_s:
            return None
        elapsed_s, marks = self._elapsed_s(), self._marks.get(self._stage, {})
        took_s = {name: took for name, took in self._took_s.items() if self._is_comparable(name)}
        ratios = ratios_of(took_s, past_s)
        past_marks = self._past.marks(stage)
        known = [(0.0, 0.0), *((past_marks[mark], seen_s) for mark, seen_s in marks.items() if mark in past_marks)]
        position_s, reached_s = max(known)
        coming = [after_s for mark, after_s in past_marks.items() if mark not in marks and after_s > position_s]
        rest_s = rest_of_stage(
            past_s=past_s[stage],
            position_s=position_s,
            following_s=min([*coming, past_s[stage]]),
            reached_s=reached_s,
            elapsed_s=elapsed_s,
            pace=expected_pace(ratios) if _uses_processors(stage) else 1.0,
            pace_lasts=self._is_comparable(stage) or stage == "weights",
        )
        if stage == "weights":
            weights_s = self._weights_left_s()
            rest_s = rest_s if weights_s is None else weights_s
        if self._is_comparable(stage):
            ratios += ratios_of({stage: elapsed_s + rest_s}, past_s)
        pace = expected_pace(ratios)
        return rest_s + sum(
            self._expected_weights_s() if name == "weights" else past_s.get(name, 0.0) * pace
            for name in START_STAGES[START_STAGES.index(stage) + 1 :]
        )

    @property
    def _past(self) -> PastStart | None:
        """The start to go by: one that read its programs from a disk if this one does, where there is one."""
        other = self._other
        return other if other is not None and other.is_from_disk == self._is_from_disk else self._last

    @property
    def _is_from_disk(self) -> bool:
        return is_from_disk(self._reading.disk_bytes["engine"])

    def _is_comparable(self, stage: str) -> bool:
        """Whether how long a stage takes, beside last time, says how fast this node's processors are now."""
        past = self._past.is_from_disk if self._past else None
        return _uses_processors(stage) and (stage != "engine" or past in (None, self._is_from_disk))

    def _expected_weights_s(self) -> float:
        """How long the weights will take, by the starts before and what is in the page cache of them."""
        starts = [start for start in (self._past, self._last, self._other) if start is not None]
        return expected_weights_s(
            [(start.took_s["weights"], start.disk_bytes("weights")) for start in starts if "weights" in start.took_s],
            size=self.checkpoint_bytes,
            cached_part=self.cached_part,
        )

    def _weights_left_s(self) -> float | None:
        """Seconds until the weights are loaded, by what is loaded of them or read; None where neither tells."""
        past_s = self._past.took_s.get("weights") if self._past else None
        return self._load.rest_s(self._clock(), past_s, other=self._imported_part)

    @property
    def _imported_part(self) -> float:
        """How much of what was read is no weights, where nothing tells when those began; as a part of them."""
        if self._has_past_bytes or self._load.counts_files or not self.checkpoint_bytes:
            return 0.0
        read, rate = self._reading.weights_and_rate
        return min(max(0.0, read - rate * self._elapsed_s()), _OTHER_BYTES) / self.checkpoint_bytes

    @property
    def _has_past_bytes(self) -> bool:
        return self._past is not None and self._past.read_bytes >= _LEAST_READ_BYTES

    @property
    def _weights_bytes(self) -> int:
        """What will be read until all weights are loaded, by all ranks; 0: not known."""
        size = self.checkpoint_bytes or 0
        if self._past is None or not self._has_past_bytes:
            return size
        past = self._past.read_bytes
        return max(past, size) if past > _MOST_OF_IT * size else past  # the last look came before the last byte

    @property
    def _of_weights(self) -> int:
        """What was read of the weights, in the way that a start before it is compared by, or their size."""
        return self._reading.weights_bytes if self._has_past_bytes else self._reading.weights_and_rate[0]

    def _bytes_per_s(self) -> float | None:
        """How fast the weights are loaded, or were; while the model is staged, how fast it is copied."""
        if self._stage == "staging":
            done, total = self._copied
            return done / self._elapsed_s() if MIB <= done < total and self._elapsed_s() > 0 else None
        took_s = self._took_s.get("weights")
        if took_s:
            size = self.checkpoint_bytes or self._reading.weights_bytes
            return size / took_s if size >= _LEAST_READ_BYTES else None
        if self._stage != "weights":
            return None
        if self.checkpoint_bytes and self._load.done and self._load.done_after_s > 0:
            return self.checkpoint_bytes * self._load.part_done / self._load.done_after_s
        _, rate = self._reading.weights_and_rate
        return rate if rate >= MIB else None

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s.get(self._stage, self._clock())

    def _enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        now, before = self._clock(), self._stage
        if before == "compile" and stage == "weights":  # other ranks still load: it goes on where it was
            self._marks.setdefault("weights", {}).update(self._marks.pop("compile", {}))
            self._took_s.pop("weights", None)
        elif before == "compile" and not self._has_compiled:  # nothing was compiled: this was profiling already
            self._marks["capture"] = self._marks.pop("compile", {})
            self._began_s["capture"] = self._began_s[before]
            if stage != "capture":
                self._took_s["capture"] = now - self._began_s[before]
        else:
            self._took_s[before] = now - self._began_s[before]
        if stage in ("staging", "weights") and stage not in self._began_s:
            (self._copy if stage == "staging" else self._load).begin(now)
        self._stage = stage
        self._began_s.setdefault(stage, now)


def _uses_processors(stage: str) -> bool:
    return stage in ("engine", "compile", "capture", "server")
