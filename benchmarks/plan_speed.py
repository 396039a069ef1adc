"""How long a plan takes: `python -m benchmarks.plan_speed`.

All times are CPU seconds, so that other programs on the machine do not count. First a plan in process (goal 50 ms):
"first" is the first plan of a fresh process and reads the catalogue from disk, "next" is the median of twenty more, and
"no fit" marks a plan that fails and looks for suggestions. Then the command `hpc-serve plan` (goal 0.3 s, with --plot
3 s), the quickest of three.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time

GOAL_S = 0.050
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


def measure(name: str, gpu: str, nodes: int | None) -> tuple[float, float, bool]:
    """(first, median of the next, whether it fits) in seconds, in this process."""
    from hpc_serve.errors import DoesNotFitError
    from hpc_serve.plan import ClusterSpec, accelerator, model_from_config, plan, resolve

    times, fits = [], True
    for _ in range(21):
        start = time.process_time()
        entry = resolve(name)
        model = model_from_config(entry.config, name=entry.name)
        try:
            plan(model, ClusterSpec(accelerator=accelerator(gpu), num_nodes=nodes))
        except DoesNotFitError:
            fits = False
        times.append(time.process_time() - start)
    return times[0], statistics.median(times[1:]), fits


def command_s(words: tuple[str, ...]) -> float:
    """CPU seconds of `hpc-serve plan` with these words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_serve.cli", "plan", *words], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr.strip())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_plans() -> None:
    """A line for each plan in process."""
    print(f"{'model':34} {'gpu':10} {'first':>9} {'next':>9}")
    worst = 0.0
    for name, gpu, nodes in QUESTIONS:
        argv = [sys.executable, "-m", "benchmarks.plan_speed", name, gpu, str(nodes or 0)]
        first, following, fits = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        worst = max(worst, float(first))
        note = "" if fits == "True" else "  no fit"
        print(f"{name:34} {gpu:10} {1000 * float(first):6.1f} ms {1000 * float(following):6.1f} ms{note}")
    print(f"slowest {1000 * worst:.0f} ms, goal {1000 * GOAL_S:.0f} ms")


def print_commands() -> None:
    """A line for each command."""
    with tempfile.TemporaryDirectory() as folder:
        for words, goal_s in COMMANDS:
            named = tuple(word.format(folder=folder) for word in words)
            print(f"{min(command_s(named) for _ in range(3)):5.2f} s (goal {goal_s:g})  plan {' '.join(words)}")


def main() -> None:
    if len(sys.argv) > 1:
        name, gpu, nodes = sys.argv[1:]
        print(*measure(name, gpu, int(nodes) or None))
        return
    print_plans()
    print_commands()


if __name__ == "__main__":
    main()
