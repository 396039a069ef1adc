"""Loads whose bytes over time are made up: constant, slowing, in bursts, of uneven shards, with compilation after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hpc_serve.job.progress import ReadSoFar, StartStages
from hpc_serve.rendezvous.start_times import PastStart
from hpc_serve.units import MIB
from tests.support.stubs import make_record
from tests.unit.job.starts import Clock, Said, tell

LOOK_S = 0.5
Way = Literal["mapped", "by_read", "from_disk"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """One start. `mib_per_s` is how fast the weights come so many seconds after the first of them.

    `imported_mib` come evenly within `imports_s` seconds before the first bar, as a rank imports what it loads with.
    Without `is_told` nothing of what is read can be seen; without `has_bar` no file is counted.
    """

    shards_mib: tuple[float, ...] = (1_000.0,) * 10
    mib_per_s: Callable[[float], float] = lambda at_s: 50.0
    engine_s: float = 40.0
    imported_mib: float = 150.0
    imports_s: float = 2.0
    compile_s: float = 0.0
    capture_s: float = 10.0
    way: Way = "mapped"
    is_told: bool = True
    has_bar: bool = True

    def slower(self, times: float) -> Load:
        """The same of a disk that is slower, throughout."""
        return replace(self, mib_per_s=lambda at_s: self.mib_per_s(at_s / times) / times)

    @property
    def size_mib(self) -> float:
        return sum(self.shards_mib)

    def events(self) -> Iterator[str | float]:
        """The lines of the engine, and between them at each look what was read so far, in MiB."""
        yield from self._looks(self.engine_s, 0.0)
        yield "(Worker pid=3) INFO 11-20 [cpu_model_runner.py:68] Starting to load model m..."
        for look in range(int(self.imports_s / LOOK_S)):
            yield self.imported_mib * look * LOOK_S / self.imports_s
        yield from self._load()
        yield "(Worker pid=3) INFO 11-20 [default_loader.py:501] Loading weights took 9.00 seconds"
        read_mib = self.imported_mib + self.size_mib
        if self.compile_s:
            yield "(Worker pid=3) INFO 11-20 [backends.py:1102] Using cache directory: /c for vLLM's torch.compile"
            yield from self._looks(self.compile_s, read_mib)
            yield "(Worker pid=3) INFO 11-20 [monitor.py:91] Initial profiling/warmup run took 3.11 s"
        yield from self._looks(self.capture_s, read_mib)

    def _load(self) -> Iterator[str | float]:
        at_s, loaded_mib, told, count = 0.0, 0.0, 0, len(self.shards_mib)
        while True:
            done = sum(sum(self.shards_mib[: n + 1]) <= loaded_mib + 1e-6 for n in range(count))
            for number in range(told, done + 1) if self.has_bar else ():
                bar = f"{100 * number // count:3d}% Completed | {number}/{count} [00:00"
                yield f"Loading safetensors checkpoint shards: {bar}"
            told = done + 1
            if done == count:
                return
            yield self.imported_mib + loaded_mib
            at_s += LOOK_S
            loaded_mib = min(self.size_mib, loaded_mib + LOOK_S * max(0.0, self.mib_per_s(at_s)))

    @staticmethod
    def _looks(seconds: float, read_mib: float) -> Iterator[float]:
        yield from [read_mib] * int(seconds / LOOK_S)


def play_load(load: Load, past: PastStart | None = None) -> tuple[PastStart, list[Said], list[Said]]:
    """A start, as it is remembered; what was said of it each second; and what was said of its weights alone."""
    clock = Clock()
    stages = StartStages(past, first="engine", clock=clock)
    stages.note_sizes([int(mib * MIB) for mib in load.shards_mib])
    stages.checkpoint_bytes = int(load.size_mib * MIB)
    told: list[tuple[float, float | None]] = []
    weights: list[tuple[float, float | None]] = []
    loaded_s = 0.0
    for event in load.events():
        if isinstance(event, str):
            tell(stages, event)
            loaded_s = loaded_s or (clock.now if "took 9.00 seconds" in event else 0.0)
            continue
        stages.note_read(ReadSoFar(**{load.way: int(event * MIB) if load.is_told else 0}))
        if clock.now % 1 == 0:
            record = stages.record(1e9)
            told.append((clock.now, record.time_left_s))
            if record.stage == "weights":
                weights.append((clock.now, record.weights_left_s))
        clock.now += LOOK_S
    stages.finish()
    return (
        stages.past_start(make_record(), 1.0),
        [Said(at_s, clock.now - at_s, left_s) for at_s, left_s in told],
        [Said(at_s, loaded_s - at_s, left_s) for at_s, left_s in weights],
    )
