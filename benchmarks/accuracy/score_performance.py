"""How good the speed estimate is, and how long it takes: `python benchmarks/accuracy/score_performance.py`.

Prints predicted against measured output tokens/s of every published row: first of those that the factors are fitted on
(each source left out in turn), then of those that nothing was fitted on. Then the CPU time of `hpc-serve plan` in a
fresh process, plain (goal 0.3 s) and with --plot (goal 3 s).
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

QUESTIONS = [
    (("--model", "70b", "--gpu", "v5e", "--max-model-len", "8192"), 0.3),
    (("--model", "70b", "--gpu", "v5e:4x4", "--max-model-len", "8192", "--explain"), 0.3),
    (("--model", "405b", "--target", "throughput"), 0.3),
    (("--model", "deepseek-r1", "--gpu", "h200", "--target", "tpot=50ms"), 0.3),
    (("--model", "70b", "--plot", "{folder}/plan.png"), 3.0),
    (("--model", "70b", "--plot", "{folder}/plan.html"), 3.0),
]


def cpu_s(words: tuple[str, ...]) -> float:
    """CPU seconds of the command, so that a shared machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_serve.cli", "plan", *words], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stderr.strip())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    from benchmarks.accuracy import speed_cases as perf_cases

    perf_cases.main()
    with tempfile.TemporaryDirectory() as folder:
        for words, goal in QUESTIONS:
            named = tuple(word.format(folder=folder) for word in words)
            print(f"{min(cpu_s(named) for _ in range(3)):5.2f} s (goal {goal:g})  plan {' '.join(words)}")


if __name__ == "__main__":
    main()
