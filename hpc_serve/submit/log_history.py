"""What the log of a run's head tells of its course: the stages of the start, and the engine's own reports since.

vLLM reports every ten seconds while it has work. Times are by the clock of the node that wrote the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.diagnose.lines import read_head
from hpc_serve.vllm.log import read_stage
from hpc_serve.vllm.report_line import EngineReport, read_report

# Of a long log both ends are read: the start is in the first, the last hours in the second.
_HEAD_BYTES, _TAIL_BYTES = 4 << 20, 16 << 20
_LONGEST_LINE = 4096
_SECONDS_A_MONTH, _SECONDS_A_DAY = 31 * 86_400, 86_400
_BEGINS, _COMMAND, _READY = "hpc-serve: launcher of ", "hpc-serve: engine command: ", " is ready at http"


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """One stage of a start: seconds since the epoch, to the second."""

    name: str
    began_at: float
    ended_at: float

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(frozen=True, kw_only=True)
class LogHistory:
    """The last run in a log. `is_ready`: its start came to an end. Reports are in the order of time."""

    stages: tuple[StageSpan, ...] = ()
    is_ready: bool = False
    reports: tuple[tuple[float, EngineReport], ...] = ()


def read_history(path: Path, *, near: float) -> LogHistory:
    """What a log tells; lines have no year, and those times are taken that are next to `near`, since the epoch."""
    history = _History(near)
    for line in _lines(path):
        for part in line.split("\r"):  # a progress bar ends each of its states with a carriage return
            history.note(part)
    return history.found()


class _History:
    def __init__(self, near: float) -> None:
        self._near = near
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._starts: list[tuple[str, float]] = []
        self._last_at: float | None = None
        self._ready_at: float | None = None
        self._reports: dict[float, EngineReport] = {}

    def note(self, line: str) -> None:
        if (report := read_report(line)) is not None:
            if (at := self._at(line)) is not None:
                self._reports[at] = report.plus(self._reports.get(at))
            return
        if _BEGINS in line:  # the log of a job that Slurm runs again has several runs
            self._begin_anew()
            self._note_stage("nodes and Ray", line)
        elif self._ready_at is None and self._starts:
            self._note_start(line)

    def _note_start(self, line: str) -> None:
        if _COMMAND in line:
            self._note_stage("starting the engine", line)
        elif _READY in line and "hpc-serve: " in line:
            self._ready_at = self._at(line) or self._last_at
        elif (stage := read_stage(line)) is not None:
            self._note_stage(stage.name, line)

    def _note_stage(self, name: str, line: str) -> None:
        at = self._at(line)
        if at is None:
            at = self._last_at
        if at is None:
            return
        self._last_at = at
        if not self._starts or self._starts[-1][0] != name:
            self._starts.append((name, at))

    def _at(self, line: str) -> float | None:
        at = read_head(line).at
        return None if at is None else _since_epoch(at, self._near)

    def found(self) -> LogHistory:
        last = self._ready_at if self._ready_at is not None else self._last_at
        ends = [at for _, at in self._starts[1:]] + ([last] if last is not None else [])
        stages = [
            StageSpan(name=name, began_at=began_at, ended_at=max(began_at, ended_at))
            for (name, began_at), ended_at in zip(self._starts, ends)
        ]
        return LogHistory(
            stages=tuple(_merged(stages)),
            is_ready=self._ready_at is not None,
            reports=tuple(sorted(self._reports.items(), key=lambda one: one[0])),
        )


def _merged(stages: Iterable[StageSpan]) -> Iterator[StageSpan]:
    """Stages that took no second are left out: what is said of them has no finer time."""
    last: StageSpan | None = None
    for stage in stages:
        if last is not None and last.name == stage.name:
            last = replace(last, ended_at=stage.ended_at)
            continue
        if last is not None and last.took_s > 0:
            yield last
        last = stage
    if last is not None:
        yield last


def _since_epoch(at: float, near: float) -> float:
    """The time of `read_head`, which has no year, as seconds since the epoch."""
    month, rest = divmod(int(at) - _SECONDS_A_DAY, _SECONDS_A_MONTH)
    day, second = divmod(rest, _SECONDS_A_DAY)
    year = time.localtime(near).tm_year
    times = [time.mktime((one, month + 1, day + 1, 0, 0, second, 0, 0, -1)) for one in (year - 1, year, year + 1)]
    return min(times, key=lambda one: abs(one - near))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            yield from _decoded(file.readlines(_HEAD_BYTES))
            size = path.stat().st_size
            if file.tell() < size - _TAIL_BYTES:
                file.seek(size - _TAIL_BYTES)
                file.readline()
            yield from _decoded(file.readlines(_TAIL_BYTES))
    except OSError:  # gone, or of a filesystem that does not answer
        return


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    return (line[:_LONGEST_LINE].decode(errors="replace").rstrip("\n") for line in lines)
