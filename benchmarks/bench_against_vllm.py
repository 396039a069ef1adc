"""`hpc-serve bench` beside `vllm bench serve` on one endpoint: `python -m benchmarks.bench_against_vllm SERVICE`.

The two run in turns with the same lengths, number of requests and concurrency; both get
prompts of their own in each round, so that no cache of prefixes helps. Printed are the medians over the rounds, and how
ours compare. The service must have one replica, since `vllm bench serve` asks one address.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

from hpc_serve.client import endpoint

FIGURES = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
# The console script of some builds does not start; its parts do. One process for all rounds, as its import takes 10 s.
VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
import shlex, sys
parser = FlexibleArgumentParser()
add_cli_args(parser)
for words in sys.stdin:
    main(parser.parse_args(shlex.split(words)))
    print("DONE", flush=True)
"""


class Runner(Protocol):
    """Makes one run and writes its result."""

    def run(self, seed: int, path: Path) -> None: ...


class Vllm:
    """`vllm bench serve`, in one process that runs it as often as it is told to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.endpoint = endpoint(options.service)
        environ = {**os.environ, **self.endpoint.variables}
        # Closing its input ends it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", VLLM],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, seed: int, path: Path) -> None:
        options = self.options
        words = ["--backend", "openai", "--base-url", self.endpoint.base_url.removesuffix("/v1")]
        words += ["--endpoint", "/v1/completions", "--model", self.endpoint.model, "--tokenizer", options.tokenizer]
        words += ["--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
        words += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
        words += ["--num-prompts", str(options.num_prompts), "--max-concurrency", str(options.max_concurrency)]
        words += ["--seed", str(seed), "--save-result", "--result-filename", str(path)]
        print(shlex.join(words), file=self.process.stdin)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line == "DONE\n":
                return
        raise SystemExit("".join(said[-40:]))


class Ours:
    """`hpc-serve bench`, a process for each round."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def run(self, seed: int, path: Path) -> None:
        options = self.options
        words = ["--lengths", f"{options.input_len}/{options.output_len}", "--num-prompts", str(options.num_prompts)]
        words += ["--max-concurrency", str(options.max_concurrency), "--seed", str(seed), "--save", str(path)]
        argv = [sys.executable, "-m", "hpc_serve.cli", "bench", options.service, *words]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_against_vllm", description=__doc__)
    parser.add_argument("service")
    parser.add_argument("--tokenizer", required=True, help="the model's folder, for vLLM's prompts")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="keep the results of all rounds")
    options = parser.parse_args()
    runs: dict[str, Runner] = {"ours": Ours(options), "vllm": Vllm(options)}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(options.rounds):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "result.json"
                runs[name].run(1000 * number + list(runs).index(name), path)
                last = json.loads(path.read_text())
            results[name].append(last)
            print(f"round {number + 1}, {name}: {last['output_throughput']:.1f} tokens/s, {last['failed']} failed")
    print(f"\n{'median of ' + str(options.rounds):<26}{'ours':>10}{'vllm':>10}{'ratio':>8}")
    for figure in FIGURES:
        ours, vllm = (statistics.median(one[figure] for one in results[name]) for name in ("ours", "vllm"))
        print(f"{figure:<26}{ours:>10.2f}{vllm:>10.2f}{ours / vllm:>8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
