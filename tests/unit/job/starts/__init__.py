"""Recorded starts, played to the stages of a start as the launcher plays an engine's lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_serve.job.progress import StartStages
from hpc_serve.rendezvous.start_times import PastStart
from hpc_serve.vllm.log import read_phrase
from tests.support.stubs import make_record

Line = tuple[float, str]


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Said:
    """What was said of a start `at_s` seconds after its begin, when it took `truth_s` more."""

    at_s: float
    truth_s: float
    left_s: float | None

    @property
    def is_right(self) -> bool:
        """Within half of the truth, or ten seconds."""
        return self.left_s is not None and abs(self.left_s - self.truth_s) <= max(self.truth_s / 2, 10.0)


def recorded(name: str) -> list[Line]:
    """A recorded start; its last line is the launcher's, that the replica is ready."""
    text = (Path(__file__).parent / f"demo-{name}.tsv").read_text(encoding="utf-8")
    lines = (line.partition("\t") for line in text.splitlines())
    return [(float(seconds), words) for seconds, _, words in lines]


def play(lines: Sequence[Line], past: PastStart | None = None) -> tuple[PastStart, list[Said]]:
    """A start, as it is remembered; and what was said of it each second while it lasted."""
    clock = Clock()
    stages = StartStages(past, first="engine", clock=clock)
    end_s = lines[-1][0]
    said = list(_play(stages, clock, lines, end_s))
    clock.now = end_s
    stages.finish()
    return stages.past_start(make_record(), 1.0), said


def _play(stages: StartStages, clock: Clock, lines: Sequence[Line], end_s: float) -> Iterator[Said]:
    coming = list(lines)
    for second in range(int(end_s)):
        while coming[0][0] <= second:
            clock.now, words = coming.pop(0)
            tell(stages, words)
        clock.now = second
        yield Said(second, end_s - second, stages.time_left_s())
    for at_s, words in coming:
        clock.now = at_s
        tell(stages, words)


def tell(stages: StartStages, line: str) -> bool | None:
    """Tell of a line as the launcher does. Whether its stage counted; None if it names none."""
    phrase = read_phrase(line)
    return stages.note_phrase(phrase.text, phrase.done, phrase.total) if phrase else None


def from_half_way(said: list[Said]) -> list[Said]:
    """What was said from half-way on."""
    return said[len(said) // 2 :]


def share_right(said: list[Said]) -> float:
    """Of what was said from half-way on, how much was right."""
    late = from_half_way(said)
    return sum(one.is_right for one in late) / len(late)
