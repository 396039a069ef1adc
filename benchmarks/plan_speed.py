"""How long a plan takes in process: `python benchmarks/plan_speed.py`. The goal is 50 ms.

CPU time, so that a shared machine does not count. "first" is the first plan of a fresh process, with the catalogue
read from disk, after the import; "next" the median of twenty more; "no fit" a plan that fails, with the search for
what would help.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
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


def main() -> None:
    if len(sys.argv) > 1:
        name, gpu, words = sys.argv[1:]
        print(*measure(name, gpu, int(words) or None))
        return
    print(f"{'model':34} {'gpu':10} {'first':>9} {'next':>9}")
    worst = 0.0
    for name, gpu, nodes in QUESTIONS:
        argv = [sys.executable, __file__, name, gpu, str(nodes or 0)]
        first, following, fits = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        worst = max(worst, float(first))
        note = "" if fits == "True" else "  no fit"
        print(f"{name:34} {gpu:10} {1000 * float(first):6.1f} ms {1000 * float(following):6.1f} ms{note}")
    print(f"slowest {1000 * worst:.0f} ms, goal {1000 * GOAL_S:.0f} ms")


if __name__ == "__main__":
    main()
