"""The stages of a start, with the time that each takes, and how long it takes until the replica is ready.

Pure: told by `job/record_keeper.py` of each phrase of the launcher or the engine, of each line that the engine logs and
of what is read. The arithmetic is in `start_estimate`; what a line says is decided in `vllm.log`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from hpc_serve.job.start_estimate import expected_pace, ratios_of, rest_of_stage, rest_of_steps
from hpc_serve.rendezvous.record import START_STAGES, StartRecord
from hpc_serve.rendezvous.start_times import PastStage, PastStart
from hpc_serve.sizes import MIB
from hpc_serve.vllm.log import read_source

STAGE_OF_PHRASE: Mapping[str, str] = {
    "waiting for the nodes' launchers": "nodes",
    "looking at the nodes": "nodes",
    "starting Ray's head": "nodes",
    "waiting for Ray nodes": "nodes",
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
_RATE_OVER_S = 15.0
_LEAST_READ_BYTES = 64 * MIB
_LEAST_READ_PART = 0.02


class StartStages:
    """One start of a replica, from its `first` stage on. `past` is the last start of the same; None: nothing is known.

    `clock` counts seconds, from anywhere.
    """

    def __init__(
        self, past: PastStart | None = None, *, first: str = "nodes", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._past, self._clock = past, clock
        self._stage, self._began_s = first, {first: clock()}
        self._took_s: dict[str, float] = {}
        self._marks: dict[str, dict[str, float]] = {}
        self._has_compiled = False
        self._steps = _Steps(clock())
        self._reading = _Reading()
        self.checkpoint_bytes: int | None = None

    @property
    def is_over(self) -> bool:
        return not self._stage

    def note_phrase(self, phrase: str, done: int | None = None, total: int | None = None) -> bool:
        """Go on to the stage that a phrase belongs to. False: the start is past it, as other ranks have told."""
        stage = STAGE_OF_PHRASE.get(phrase)
        if self.is_over or stage is None:
            return not self.is_over
        is_further = START_STAGES.index(stage) >= START_STAGES.index(self._stage)
        loads_more = stage == "weights" and self._stage == "compile" and not self._has_compiled
        if not is_further and not (loads_more and done is not None and total is not None and done < total):
            return False
        self._has_compiled = self._has_compiled or phrase == "compiling"
        self._enter(stage)
        if stage == "weights" and phrase == "loading weights" and done is not None and total is not None:
            self._steps.note(done, total, self._clock())
        return True

    def note_line(self, line: str) -> None:
        """Remember when the engine first logged from a place in its source."""
        marks = self._marks.setdefault(self._stage, {})
        if not self.is_over and len(marks) < _MOST_MARKS and (source := read_source(line)):
            marks.setdefault(source, self._elapsed_s())

    def note_read_bytes(self, read_bytes: int) -> None:
        """Note what the processes of the run have read so far."""
        self._reading.note(read_bytes, self._clock(), is_of_weights=self._stage == "weights")

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
                PastStage(name=name, took_s=seconds, marks=self._marks.get(name, {}))
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
        if stage not in past_s:
            return None
        elapsed_s, marks = self._elapsed_s(), self._marks.get(self._stage, {})
        ratios = ratios_of({name: took for name, took in self._took_s.items() if _uses_processors(name)}, past_s)
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
        )
        if stage == "weights":
            rest_s = self._weights_left_s() or rest_s
        if _uses_processors(stage):
            ratios += ratios_of({stage: elapsed_s + rest_s}, past_s)
        later = START_STAGES[START_STAGES.index(stage) + 1 :]
        pace = expected_pace(ratios)
        return rest_s + sum(past_s.get(name, 0.0) * (pace if _uses_processors(name) else 1.0) for name in later)

    def _weights_left_s(self) -> float | None:
        """Seconds until the weights are loaded, by what is loaded of them or read; None where neither tells."""
        now = self._clock()
        past_s = self._past.took_s.get("weights") if self._past else None
        if self._steps.total > 1:
            return self._steps.rest_s(now, past_s)
        read, past_read = self._reading.weights_bytes, self._past.read_bytes if self._past else 0
        if past_read >= _LEAST_READ_BYTES:
            if _LEAST_READ_PART * past_read <= read < past_read:
                return self._elapsed_s() * (past_read - read) / read
            return None
        rate = self._reading.bytes_per_s
        if self.checkpoint_bytes and rate >= MIB and read < self.checkpoint_bytes:
            return (self.checkpoint_bytes - read) / rate
        return None

    def _bytes_per_s(self) -> float | None:
        """How fast the weights are loaded, or were."""
        took_s = self._took_s.get("weights")
        if took_s:
            size = self.checkpoint_bytes or self._reading.weights_bytes
            return size / took_s if size >= _LEAST_READ_BYTES else None
        if self._stage != "weights":
            return None
        done_after_s = self._steps.done_after_s
        if self.checkpoint_bytes and self._steps.done and done_after_s > 0:
            return self.checkpoint_bytes * self._steps.done / self._steps.total / done_after_s
        return self._reading.bytes_per_s if self._reading.bytes_per_s >= MIB else None

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s.get(self._stage, self._clock())

    def _enter(self, stage: str) -> None:
        if stage == self._stage:
            return
        now, before = self._clock(), self._stage
        if before == "compile" and stage == "weights":  # other ranks still load: it goes on where it was
            self._marks.setdefault("weights", {}).update(self._marks.pop("compile", {}))
            del self._took_s["weights"]
        elif before == "compile" and not self._has_compiled:  # nothing was compiled: this was profiling already
            self._marks["capture"] = self._marks.pop("compile", {})
            self._began_s["capture"] = self._began_s[before]
            if stage != "capture":
                self._took_s["capture"] = now - self._began_s[before]
        else:
            self._took_s[before] = now - self._began_s[before]
        self._stage = stage
        self._began_s.setdefault(stage, now)


def _uses_processors(stage: str) -> bool:
    return stage in ("engine", "compile", "capture", "server")


class _Steps:
    """The files of weights that are loaded, as the engine counts them from `began_s` on."""

    def __init__(self, began_s: float) -> None:
        self.done = self.total = 0
        self.done_after_s = 0.0
        self._began_s = began_s

    def note(self, done: int, total: int, now: float) -> None:
        if done < self.done or total != self.total:  # another bar has begun
            self._began_s, self.done, self.done_after_s = now, 0, 0.0
        if done > self.done:
            self.done, self.done_after_s = done, now - self._began_s
        self.total = total

    def rest_s(self, now: float, past_s: float | None) -> float | None:
        return rest_of_steps(
            done=self.done,
            total=self.total,
            done_after_s=self.done_after_s,
            elapsed_s=now - self._began_s,
            step_s=None if past_s is None else past_s / self.total,
        )


class _Reading:
    """What the processes of a run have read of the weights, and how fast of late."""

    def __init__(self) -> None:
        self.weights_bytes = 0
        self._latest: int | None = None
        self._total = 0
        self._lately: deque[tuple[float, int]] = deque()

    @property
    def bytes_per_s(self) -> float:
        if len(self._lately) < 2:
            return 0.0
        (since_s, before), (until_s, after) = self._lately[0], self._lately[-1]
        return (after - before) / (until_s - since_s) if until_s > since_s else 0.0

    def note(self, read_bytes: int, now: float, *, is_of_weights: bool) -> None:
        # It falls where a process has ended; what was read before the first look was not of the weights.
        read = 0 if self._latest is None else max(0, read_bytes - self._latest)
        self._latest = read_bytes
        self._total += read
        if is_of_weights:
            self.weights_bytes += read
        else:
            self._lately.clear()
        self._lately.append((now, self._total))
        while now - self._lately[0][0] > _RATE_OVER_S:
            self._lately.popleft()
