"""Loads whose bytes over time are made up: constant, slowing, in bursts, of uneven shards, with compilation after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hpc_serve.job.progress.reading import ReadSoFar
from hpc_serve.job.progress.start_stages import StartStages
from hpc_serve.rendezvous.start_times import PastStart
from hpc_serve.sizes import MIB
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


def play_load(load: Load, past: PastStart | None = None) -> tuple[PastStart, list[Said], list[Said]]:
    """A start, as it is remembered; what was said of it each second; and what was said of its weights alone."""
    clock = Clock()
    stages = StartStages(past, first="engine", clock=clock)
    stages.note_sizes([int(mib * MIB) for mib in load.shards_mib])
    stages.checkpoint_bytes = int(load.size_mib * MIB)
    told: list[tuple[float, float | None]] = []
    weights: list[tuple[float, float | None]] = []

    def look(read_mib: float) -> None:
        shown = read_mib if load.is_told else 0.0
        stages.note_read(ReadSoFar(**{load.way: int(shown * MIB)}))
        if clock.now % 1 == 0:
            record = stages.record(1e9)
            told.append((clock.now, record.time_left_s))
            if record.stage == "weights":
                weights.append((clock.now, record.weights_left_s))

    def wait(seconds: float, read_mib: float) -> None:
        until_s = clock.now + seconds
        while clock.now < until_s:
            look(read_mib)
            clock.now += LOOK_S

    wait(load.engine_s, 0.0)
    tell(stages, "(Worker pid=3) INFO 11-20 [cpu_model_runner.py:68] Starting to load model m...")
    begin_s, read_mib = clock.now, 0.0
    while clock.now < begin_s + load.imports_s:
        look(read_mib)
        clock.now += LOOK_S
        read_mib += load.imported_mib * LOOK_S / load.imports_s
    begin_s, loaded_mib, done = clock.now, 0.0, -1
    while True:
        whole = next(
            (n for n in range(len(load.shards_mib)) if sum(load.shards_mib[: n + 1]) > loaded_mib + 1e-6), None
        )
        now_done = len(load.shards_mib) if whole is None else whole
        for number in range(done + 1, now_done + 1):
            if load.has_bar:
                bar = f"{100 * number // len(load.shards_mib):3d}% Completed | {number}/{len(load.shards_mib)} [00:00"
                tell(stages, f"Loading safetensors checkpoint shards: {bar}")
        done = now_done
        if done == len(load.shards_mib):
            break
        look(read_mib + loaded_mib)
        clock.now += LOOK_S
        loaded_mib = min(load.size_mib, loaded_mib + LOOK_S * max(0.0, load.mib_per_s(clock.now - begin_s)))
    read_mib += load.size_mib
    loaded_s = clock.now
    tell(stages, "(Worker pid=3) INFO 11-20 [default_loader.py:501] Loading weights took 9.00 seconds")
    if load.compile_s:
        tell(stages, "(Worker pid=3) INFO 11-20 [backends.py:1102] Using cache directory: /c for vLLM's torch.compile")
        wait(load.compile_s, read_mib)
        tell(stages, "(Worker pid=3) INFO 11-20 [monitor.py:91] Initial profiling/warmup run took 3.11 s")
    wait(load.capture_s, read_mib)
    stages.finish()
    end_s = clock.now
    return (
        stages.past_start(make_record(), 1.0),
        [Said(at_s, end_s - at_s, left_s) for at_s, left_s in told],
        [Said(at_s, loaded_s - at_s, left_s) for at_s, left_s in weights],
    )
