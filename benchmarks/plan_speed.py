"""How long a plan takes: `python -m benchmarks.plan_speed`. Three minutes.

All times are CPU time, so that other programs on the machine do not count. First a plan in process (goal 50 ms):
"first" is the first plan of a fresh process and reads the catalogue from disk, "next" is the median of twenty more, and
"no fit" marks a plan that fails and looks for suggestions. Then the command `hpc-serve plan` (goal 0.3 s, with --plot
3 s).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

from benchmarks.common import Benchmark, Figures, Measured, run_alone

QUESTIONS = [
    ("8b", "h100-80gb", None),
    ("70b", "h100-80gb", None),
    ("405b", "h100-80gb", None),
    ("405b", "h100-80gb", 1),
    ("deepseek-r1", "h100-80gb", None),
    ("deepseek-r1", "l40s", 1),
    ("gemma-3-27b", "a100-80gb", None),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "h200", None),
]
COMMANDS = [
    (("--model", "70b", "--gpu", "v5e", "--max-model-len", "8192"), 0.3),
    (("--model", "70b", "--gpu", "v5e:4x4", "--max-model-len", "8192", "--explain"), 0.3),
    (("--model", "405b", "--target", "throughput"), 0.3),
    (("--model", "deepseek-r1", "--gpu", "h200", "--target", "tpot=50ms"), 0.3),
    (("--model", "70b", "--plot", "{folder}/plan.png"), 3.0),
    (("--model", "70b", "--plot", "{folder}/plan.html"), 3.0),
]


def plan_here(name: str, gpu: str, nodes: int | None, times: int) -> tuple[float, float, bool]:
    """(first, median of the next, whether it fits) in seconds, in this process."""
    from hpc_serve.errors import DoesNotFitError
    from hpc_serve.plan import ClusterSpec, accelerator, model_from_config, plan, resolve

    seen, fits = [], True
    for _ in range(times):
        start = time.process_time()
        entry = resolve(name)
        model = model_from_config(entry.config, name=entry.name)
        try:
            plan(model, ClusterSpec(accelerator=accelerator(gpu), num_nodes=nodes))
        except DoesNotFitError:
            fits = False
        seen.append(time.process_time() - start)
    return seen[0], statistics.median(seen[1:]), fits


def plan_in_process(name: str, gpu: str, nodes: int | None, times: int) -> Figures:
    """The plan of a fresh process."""
    code = f"from benchmarks.plan_speed import plan_here; print(*plan_here({name!r}, {gpu!r}, {nodes!r}, {times!r}))"
    first, following, _ = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return {"first, CPU ms": 1e3 * float(first), "next, CPU ms": 1e3 * float(following)}


def command(words: tuple[str, ...]) -> Figures:
    """`hpc-serve plan` with these words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "hpc_serve.cli", "plan", *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"CPU s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(options: argparse.Namespace, measured: Measured) -> None:
    turns = {}
    for name, gpu, nodes in QUESTIONS[: options.most]:
        where = f"{gpu}, {nodes} node" if nodes else gpu
        _, _, fits = plan_here(name, gpu, nodes, 2)
        turns[f"{name} on {where}{'' if fits else ', no fit'}"] = partial(
            plan_in_process, name, gpu, nodes, options.times
        )
    measured.take_turns("a plan in process, goal 50 ms", turns, rounds=options.rounds, warm=False)
    with tempfile.TemporaryDirectory() as folder:
        for goal_s in (0.3, 3.0):
            commands = [words for words, goal in COMMANDS[: options.most] if goal == goal_s]
            turns = {
                " ".join(words).format(folder="."): partial(
                    command, tuple(word.format(folder=folder) for word in words)
                )
                for words in commands
            }
            measured.take_turns(f"`hpc-serve plan`, goal {goal_s:g} s", turns, rounds=options.rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=int, default=21, help="plans in a process")
    parser.add_argument("--most", type=int, help="only so many of each kind")


BENCHMARK = Benchmark(
    name="plan_speed", about=__doc__, measure=measure, rounds=5, options=add_options, short={"times": 2, "most": 1}
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
