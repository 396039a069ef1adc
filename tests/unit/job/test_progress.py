"""The stages of a start as lines of several versions of vLLM, and the launcher's own phrases, tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.progress import STAGE_OF_PHRASE, ReadSoFar, RunReading, StartStages, weight_sizes
from hpc_serve.rendezvous.record import START_STAGES
from hpc_serve.rendezvous.start_times import PastStart
from hpc_serve.units import GIB, MIB
from hpc_serve.vllm.log import PHRASES, read_phrase
from tests.unit.job.starts import Clock, from_half_way, play, recorded, share_right, tell
from tests.unit.job.starts.loads import Load, play_load

# As threads show them: vLLM 0.6 (#11349), 0.8 (gateway-api-inference-extension#550), 0.19 (#39559), 0.20 (#38820).
GENERATIONS = {
    "0.6": """
weights  INFO 12-19 22:58:10 model_runner.py:1094] Starting to load model m...
compile  INFO 12-19 22:58:14 model_runner.py:1099] Loading model weights took 2.3185 GB
compile  INFO 12-19 22:58:16 gpu_executor.py:76] # GPU blocks: 131014, # CPU blocks: 8192
capture  INFO 12-19 22:58:27 model_runner.py:1415] Capturing cudagraphs for decoding. This may lead to unexpected
capture  Capturing CUDA graph shapes: 100%|██████████| 35/35 [00:13<00:00,  2.51it/s]
capture  INFO 12-19 22:58:41 model_runner.py:1535] Graph capturing finished in 14 secs, took 0.21 GiB
server   INFO:     Application startup complete.
""",
    "0.8": """
weights  INFO 03-21 20:15:10 [gpu_model_runner.py:1128] Starting to load model m...
compile  INFO 03-21 20:15:11 [loader.py:429] Loading weights took 1.10 seconds
compile  INFO 03-21 20:15:44 [monitor.py:33] torch.compile takes 28.77 s in total
capture  INFO 03-21 20:15:45 [worker.py:267] Memory profiling takes 34.26 seconds
capture  INFO 03-21 20:15:46 [executor_base.py:111] # cuda blocks: 7191, # CPU blocks: 512
capture  Capturing CUDA graph shapes:  23%|██        | 8/35 [00:04<00:12,  2.15it/s]
""",
    "0.19": """
weights  Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]
compile  (Worker_TP0 pid=3) INFO 05-06 20:59:57 [default_loader.py:384] Loading weights took 24.84 seconds
compile  INFO 04-13 22:09:33 [backends.py:1070] Using cache directory: /c/rank_0_0/backbone for vLLM's torch.compile
compile  INFO 04-13 22:09:34 [backends.py:286] Directly load the compiled graph(s) for compile range (1, 2048) from
compile  (EngineCore pid=1) INFO 04-13 22:09:34 [monitor.py:48] torch.compile took 1.61 s in total
capture  (EngineCore pid=1) INFO 04-13 22:09:35 [monitor.py:76] Initial profiling/warmup run took 0.11 s
capture  INFO 04-13 22:09:35 [gpu_model_runner.py:5914] Profiling CUDA graph memory: PIECEWISE=51 (largest=512),
""",
    "0.32": """
weights  Multi-thread loading shards:  50% Completed | 2/4 [00:02<00:02,  1.00s/it]
compile  (W) INFO 09-22 12:15:10 [backends.py:390] Compiling a graph for compile range (1, 8192) takes 6.06 s
capture  Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|████      | 14/35 [00:01<00:01]
capture  Capturing prefill CUDA graphs (PIECEWISE): 100%|██████████| 3/3 [00:00<00:00, 106.98it/s]
capture  (W) INFO 09-22 12:15:36 [gpu_worker.py:625] Available KV cache memory: 6.13 GiB
server   (APIServer pid=7) INFO 11-22 13:37:51 [entry.py:140] Starting vLLM server on https://127.0.0.1:1
""",
    "0.32 on CPUs": """
weights  (Worker pid=1) INFO 11-22 13:37:49 [cpu_model_runner.py:68] Starting to load model /model...
compile  (Worker pid=1) INFO 11-22 13:37:49 [default_loader.py:501] Loading weights took 0.01 seconds
compile  (EngineCore pid=1) INFO 11-22 13:37:50 [kv_cache_utils.py:2327] CPU KV cache size: 32,768 tokens
compile  INFO 11-22 13:37:50 [cpu_model_runner.py:87] Warming up model for the compilation...
server   INFO:     Application startup complete.
""",
}


@pytest.mark.parametrize("version", GENERATIONS)
def test_lines_of_each_generation_lead_through_the_stages(version):
    stages = StartStages(first="engine", clock=Clock())
    for row in GENERATIONS[version].splitlines()[1:]:
        stage, _, line = row.partition(" ")
        tell(stages, line)
        assert (stages.record(1e9).stage, line) == (stage, line)


@pytest.mark.parametrize(
    ("line", "text", "done", "total"),
    [
        ("Loading safetensors using Runai Model Streamer:  12% Completed | 30/254 [00:01<", "loading weights", 30, 254),
        ("Loading pt checkpoint shards:  50% Completed | 1/2 [00:02<00:02]", "loading weights", 1, 2),
        ("Fetching 30 files:  10%|█         | 3/30 [00:10<01:30]", "downloading weights", 3, 30),
        ("model-1-of-2.safetensors:  45%|████▌     | 2.1G/4.6G [00:01<00:02]", "downloading weights", None, None),
        ("Loading weights took 24.84 seconds", "weights loaded", None, None),
    ],
)
def test_other_bars_are_read_too(line, text, done, total):
    phrase = read_phrase(line)
    assert (phrase.text, phrase.done, phrase.total) == (text, done, total)


def test_each_phrase_belongs_to_a_stage_that_there_is():
    assert set(STAGE_OF_PHRASE.values()) == set(START_STAGES)
    assert PHRASES - set(STAGE_OF_PHRASE) == {"sizing the KV cache", "warming up"}  # said at different places


def test_the_stages_of_a_start_have_their_times():
    past, *_ = play_load(Load(compile_s=60.0))
    assert past.took_s == {"engine": 40.0, "weights": 202.0, "compile": 60.0, "capture": 10.0}


def test_without_compilation_the_time_after_the_weights_is_for_the_cache():
    past, _ = play(recorded("quiet"))
    assert list(past.took_s) == ["engine", "weights", "capture", "server"]


RANK_IS_DONE = "(Worker_TP3 pid=3) INFO 11-20 10:00:00 [default_loader.py:501] Loading weights took 9.00 seconds"
BAR = "Loading safetensors checkpoint shards:  50% Completed | {}/4 [00:00<00:00]"


def test_a_start_goes_on_with_its_weights_while_other_ranks_have_theirs():
    clock = Clock()
    stages = StartStages(first="engine", clock=clock)
    clock.now = 10
    tell(stages, BAR.format(1))
    clock.now = 20
    tell(stages, RANK_IS_DONE)
    assert stages.record(1e9).stage == "compile"
    clock.now = 30
    assert tell(stages, BAR.format(3))
    record = stages.record(1e9)
    assert (record.stage, record.since, record.took_s) == ("weights", 1e9 - 20, {"engine": 10.0})
    clock.now = 40
    tell(stages, "(Worker_TP0 pid=3) INFO 11-20 10:00:00 [backends.py:1166] Dynamo bytecode transform time: 8.52 s")
    assert stages.record(1e9).took_s == {"engine": 10.0, "weights": 30.0}
    assert tell(stages, BAR.format(3)) is False  # of a rank that is late: the start is past it
    assert stages.record(1e9).stage == "compile"


def test_what_belongs_to_no_stage_changes_none():
    stages = StartStages(first="engine", clock=Clock())
    assert stages.note_phrase("not ready: 503")
    assert stages.record(1e9).stage == "engine"


def test_the_checkpoints_size_and_the_time_of_the_weights_are_their_rate():
    clock = Clock()
    stages = StartStages(first="weights", clock=clock)
    stages.checkpoint_bytes = 10 * 2**30
    stages.note_phrase("loading weights", 0, 4)
    clock.now = 5
    stages.note_phrase("loading weights", 2, 4)
    assert stages.record(1e9).bytes_per_s == 2**30
    clock.now = 20
    stages.note_phrase("compiling")
    assert stages.record(1e9).bytes_per_s == 2**29


def test_a_start_that_is_over_stays_over():
    clock = Clock()
    stages = StartStages(first="server", clock=clock)
    clock.now = 3
    stages.finish()
    assert not stages.note_phrase("loading weights", 1, 2)
    record = stages.record(1e9)
    assert (record.stage, record.took_s, record.time_left_s) == ("", {"server": 3.0}, None)


PAST = PastStart(service="s", model="m", layout="l", ready_at=0.0, took_s={"engine": 30.0})


def test_a_model_that_is_staged_has_its_speed_and_the_time_left():
    clock = Clock()
    stages = StartStages(PAST, clock=clock)
    stages.note_phrase("waiting for the nodes' launchers")
    stages.note_phrase("staging the model")
    clock.now = 10.0
    stages.note_copied(GIB, 4 * GIB)
    record = stages.record(0.0)
    assert (record.stage, record.bytes_per_s, record.time_left_s) == ("staging", GIB / 10, 60.0)
    stages.note_copied(4 * GIB, 4 * GIB)
    assert stages.record(0.0).bytes_per_s is None
    assert stages.note_phrase("waiting for Ray nodes")  # Ray starts after the copy
    assert stages.record(0.0).stage == "staging"
    clock.now = 12.0
    stages.note_phrase("starting the engine")
    assert stages.record(0.0).took_s == {"nodes": 0.0, "staging": 12.0}


def test_a_copy_that_becomes_slow_is_foretold_by_its_rate_of_late():
    clock = Clock()
    stages = StartStages(PAST, clock=clock)
    clock.now = 5.0
    stages.note_phrase("staging the model")
    for second in range(1, 101):  # 1 GiB/s for 50 s, then a quarter of it
        clock.now = 5.0 + second
        stages.note_copied(int((min(second, 50) + max(0, second - 50) / 4) * GIB), 80 * GIB)
    assert stages.record(0.0).time_left_s == pytest.approx(17.5 * 4 + 30, abs=10)


# -- How right the time left is: recorded starts are played again


@pytest.mark.parametrize(("before", "now"), [("quiet", "again"), ("again", "quiet")])
def test_a_start_like_the_last_one_is_foretold_from_half_way_on(before, now):
    past, _ = play(recorded(before))
    _, said = play(recorded(now), past)
    assert [one for one in from_half_way(said) if not one.is_right] == []


def test_a_stage_that_takes_longer_than_last_time_is_not_said_to_end_at_once():
    clock = Clock()
    past = PastStart(service="m", model="m", layout="l", ready_at=0.0, took_s={"engine": 40.0, "server": 5.0})
    stages = StartStages(past, first="engine", clock=clock)
    for clock.now, left_s in ((10.0, 35.0), (39.0, 6.0), (80.0, 25.0)):
        assert stages.time_left_s() == left_s


# -- The time left of loads that are made up: within half of the truth, or ten seconds, from half-way on


LEAST_RIGHT = 0.9
RATES: dict[str, Callable[[float], float]] = {
    "constant": lambda at_s: 50.0,
    "slowing": lambda at_s: 50.0 * max(0.4, 1 - at_s / 600),
    "slow after a minute": lambda at_s: 80.0 if at_s < 60 else 25.0,
    "fast after a minute": lambda at_s: 20.0 if at_s < 60 else 80.0,
    "in bursts": lambda at_s: 250.0 if at_s % 5 < 1 else 0.0,
}
SHARDS = {
    "one file": (10_000.0,),
    "3 files": (4_000.0, 4_000.0, 2_000.0),
    "10 files": (1_000.0,) * 10,
    "40 files": (250.0,) * 40,
    "uneven files": (4_000.0, 200.0, 300.0, 200.0, 4_000.0, 800.0, 500.0),
}
COMPILES_S = (0.0, 60.0)
PASTS = {"the same disk": 1.0, "a disk 3x faster": 1 / 3, "a disk 3x slower": 3.0, "a disk 10x faster": 0.1}


@pytest.mark.parametrize("compile_s", COMPILES_S)
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rate", RATES)
def test_a_load_is_foretold_by_its_own_rate_whatever_the_last_one_was(rate, shards, past, compile_s):
    load = Load(shards_mib=SHARDS[shards], mib_per_s=RATES[rate], compile_s=compile_s)
    _, said, weights = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT
    assert share_right(weights) >= LEAST_RIGHT


@pytest.mark.parametrize("way", ["mapped", "by_read", "from_disk"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rate", RATES)
def test_the_weights_of_a_first_start_are_foretold_and_nothing_else(rate, shards, way):
    _, said, weights = play_load(Load(shards_mib=SHARDS[shards], mib_per_s=RATES[rate], way=way))
    assert share_right(weights) >= LEAST_RIGHT
    assert {one.left_s for one in said} == {None}


def test_a_start_whose_imports_are_slow_is_foretold():
    _, said, _ = play_load(Load(engine_s=100.0, compile_s=60.0), play_load(Load(compile_s=60.0))[0])
    assert share_right(said) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("shards", ["10 files", "40 files", "uneven files"])
def test_where_nobody_sees_what_is_read_files_count_by_their_bytes(shards, past):
    load = Load(shards_mib=SHARDS[shards], is_told=False)
    _, said, _ = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("rate", RATES)
def test_where_nobody_counts_files_what_is_read_tells(rate, past):
    load = Load(mib_per_s=RATES[rate], has_bar=False)
    _, said, _ = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT


@pytest.mark.parametrize("past", PASTS)
def test_what_a_rank_imports_hides_nothing_of_a_small_model(past):
    """470 MiB of weights, and 300 MiB of programs that are mapped before them within ten seconds."""
    load = Load(shards_mib=(470.0,), mib_per_s=lambda at_s: 6.0, imported_mib=300.0, imports_s=10.0)
    _, said, weights = play_load(load, play_load(load.slower(PASTS[past]))[0])
    assert share_right(said) >= LEAST_RIGHT
    assert share_right(weights) >= LEAST_RIGHT


# -- What processes read is seen however they read it


SIZE = 32 * MIB


def looks_at(name: str, *steps: str, words: tuple[str, ...] = ()) -> list[ReadSoFar]:
    """What is counted of a process before its first step, and after each of them."""
    mark = f"test-{os.getpid()}-{name}"
    lines = [line for step in ("pass", *steps) for line in (step, "print(flush=True)", "sys.stdin.readline()")]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(["import mmap, sys", *lines]), *words],
        env={**os.environ, **mark_environ(mark)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    reading, found = RunReading(mark), []
    with process.stdin, process.stdout:
        for _ in range(len(steps) + 1):
            assert process.stdout.readline() == b"\n"
            found.append(reading.look())
            process.stdin.write(b"\n")
            process.stdin.flush()
    process.wait()
    return found


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    return path


def test_what_marked_processes_read_is_counted():
    before, after = looks_at("reader", "kept = open('/dev/zero', 'rb').read(10_000_000)")
    assert after.by_read - before.by_read >= 10_000_000


MAP = "f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])"


def test_a_mapped_file_is_counted_though_no_byte_comes_by_read_and_stays_counted_when_it_is_unmapped(weights):
    """As vLLM loads weights that the page cache has, or that lie on FUSE."""
    before, mapped, closed = looks_at("mapper", MAP, "m.close()", words=(str(weights),))
    assert closed.mapped - before.mapped >= mapped.mapped - before.mapped >= 0.9 * SIZE
    assert mapped.by_read - before.by_read < SIZE / 2


def test_counts_of_nodes_are_added():
    both = ReadSoFar(by_read=1, from_disk=2, mapped=3) + ReadSoFar(by_read=10, mapped=30)
    assert (both, both.total) == (ReadSoFar(by_read=11, from_disk=2, mapped=33), 46)


def test_files_of_weights_are_in_the_order_in_which_they_are_loaded(tmp_path):
    for number in (10, 2, 1):
        (tmp_path / f"part-{number}.safetensors").write_bytes(b"w" * number)
    assert weight_sizes(tmp_path) == [1, 2, 10]
