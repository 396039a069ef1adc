"""What two runs of `bench` teach the plan: `python -m benchmarks.learned_here`. Five minutes, with a real engine.

A tiny model is served on this machine as if its cores were those of a catalogued CPU, so the printed speed is far off.
The service is benched twice at one length. Then the plan is asked for other lengths, other numbers of requests and
another layout, with the two runs and without (`--no-measured`), and each is measured. A further run is made while
programs keep all cores busy. A note says whether `bench` kept it, and what the plan would make of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench_against_vllm import ENGINE
from benchmarks.common import Benchmark, Measured, run_alone, show, variables
from hpc_serve.demo_model import make_demo_model
from hpc_serve.plan.speed.measured import MeasuredHere
from hpc_serve.submit.plans.planning import FILE, measured_runs

GPU = "cpu-spr"
SIZES: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
MACHINE = ("--gpu", GPU, "--gpu-memory", "4GiB")
OPTIONS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "134217728", "--enforce-eager")
ONE, TWO = ("-tp", "1"), ("-tp", "2", "--gpus-per-node", "2")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked in a run; lengths in tokens."""

    input_len: int
    output_len: int
    at_once: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len} tokens, {self.at_once} in flight"


TAUGHT = Load(input_len=128, output_len=64, at_once=4)
ASKED = (
    TAUGHT,
    replace(TAUGHT, input_len=512),
    replace(TAUGHT, output_len=192),
    replace(TAUGHT, at_once=1),
    replace(TAUGHT, at_once=12),
    Load(input_len=384, output_len=128, at_once=8),
)


def command(*words: str) -> Any:
    """The JSON that a command of ours prints."""
    done = subprocess.run([sys.executable, "-m", "hpc_serve.cli", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout) if "--json" in words else done.stderr


@contextlib.contextmanager
def serving(model: Path, name: str, layout: tuple[str, ...]) -> Iterator[None]:
    """A service of the model in this layout, ready."""
    show(f"starting {name}")
    own = ("--model", str(model), "--name", name, "--cluster", "local", "--wait")
    command("submit", *own, *MACHINE, *layout, "--", "--dtype", "bfloat16", *OPTIONS)
    try:
        yield
    finally:
        command("stop", name)


def bench(name: str, load: Load, each: int) -> dict[str, Any]:
    """The result of a run with so many requests for each in flight."""
    show(f"{name}: {load}")
    found: dict[str, Any] = command(
        *("bench", name, "--lengths", f"{load.input_len}/{load.output_len}", "--json"),
        *("--max-concurrency", str(load.at_once), "--num-prompts", str(each * load.at_once)),
    )
    return found


def printed(model: Path, layout: tuple[str, ...], load: Load, *words: str) -> dict[str, Any]:
    """The estimate of the plan at this load."""
    lengths = ("--input-tokens", str(load.input_len), "--output-tokens", str(load.output_len))
    asked = (*MACHINE, *layout, *lengths, "--concurrency", str(load.at_once), *OPTIONS)
    found = command("plan", "--model", str(model), *asked, "--json", *words)["performance"]["by_concurrency"]
    (one,) = [one for one in found if one["concurrency"] == load.at_once]
    return dict(one)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """One program on each core that does nothing but work."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def compare(
    measured: Measured, model: Path, name: str, layout: tuple[str, ...], load: Load, options: argparse.Namespace
) -> None:
    """One load: measured, printed without runs, and with the two."""
    before, after = (printed(model, layout, load, *words) for words in (("--no-measured",), ()))
    runs = [bench(name, load, options.each)["output_throughput"] for _ in range(options.rounds)]
    low, high = (bound * after["expected"]["output_tokens_per_s"] for bound in after["measured"]["bounds"])
    held = sum(low <= one <= high for one in runs)
    case = f"{'TP=2' if layout == TWO else 'TP=1'}, {load}"
    measured.add(case, "measured", {"tokens/s": runs})
    for contender, one, note in (
        ("printed, --no-measured", before, ""),
        ("printed", after, f"{low:,.0f} to {high:,.0f} holds {held} of {len(runs)}"),
    ):
        tokens_per_s = one["expected"]["output_tokens_per_s"]
        measured.add(case, contender, {"tokens/s": [tokens_per_s] * len(runs)}, base="measured", note=note)


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as root:
        home = Path(root) / "home"
        model = make_demo_model(Path(root) / "model", **SIZES, **HEADS)
        with variables(**ENGINE, HPC_SERVE_HOME=str(home), HF_HOME=f"{root}/hf"):
            with serving(model, "one", ONE):
                for _ in range(2):
                    bench("one", TAUGHT, options.each)
                taught = measured_runs(home)
                if len(taught) != 2:
                    raise SystemExit("bench kept no two runs: other programs use this machine's cores.")
                shutil.copy(home / FILE, Path(root) / FILE)
                for load in ASKED:
                    compare(measured, model, "one", ONE, load, options)
                    shutil.copy(Path(root) / FILE, home / FILE)  # the plan knows the first two runs alone
                with busy_cores():
                    slow = bench("one", TAUGHT, options.each)
            kept = len(measured_runs(home)) - 2
            with serving(model, "two", TWO):
                compare(measured, model, "two", TWO, TAUGHT, options)
    third = replace(taught[0], tokens_per_s=slow["output_throughput"])
    ratios = [MeasuredHere(runs, GPU).correction(taught[0].case, None) for runs in (taught, (*taught, third))]
    ours = taught[0].printed_tokens_per_s
    measured.notes.append(
        f"{TAUGHT}, with a program on each core that does nothing but work: {slow['output_throughput']:.0f} tokens/s. "
        f"`bench` {'kept' if kept else 'did not keep'} it: {' '.join(slow['notes']) or 'no remark'} Beside the first "
        f"two it would change the printed {ratios[0].ratio * ours:.0f} tokens/s to {ratios[1].ratio * ours:.0f}."
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=10, help="requests of a run for each that is under way at once")


BENCHMARK = Benchmark(
    name="learned_here", about=__doc__, measure=measure, rounds=2, options=add_options, needs="a real engine"
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
