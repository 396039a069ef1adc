"""`hpc-serve bench` beside `vllm bench serve` on one endpoint: `python -m benchmarks.bench_against_vllm SERVICE`.

The two run in turns, each in a process of its own, with the same lengths, number of requests and concurrency; both get
prompts of their own in each round, so that no cache of prefixes helps. Printed are the medians over the rounds, and how
ours compare. The service must have one replica, since `vllm bench serve` asks one address.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
# The console script of some builds does not start; its parts do.
VLLM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def run_vllm(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    found = endpoint(options.service)
    words = ["--backend", "openai", "--base-url", found.base_url.removesuffix("/v1"), "--endpoint", "/v1/completions"]
    words += ["--model", found.model, "--tokenizer", options.tokenizer, "--dataset-name", "random", "--ignore-eos"]
    words += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    words += ["--num-prompts", str(options.num_prompts), "--max-concurrency", str(options.max_concurrency)]
    words += ["--seed", str(seed), "--disable-tqdm", "--save-result", "--result-filename", str(folder / "vllm.json")]
    return result([sys.executable, "-c", VLLM, *words], folder / "vllm.json", found.variables)


def run_ours(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    words = ["--lengths", f"{options.input_len}/{options.output_len}", "--num-prompts", str(options.num_prompts)]
    words += [
        "--max-concurrency",
        str(options.max_concurrency),
        "--seed",
        str(seed),
        "--save",
        str(folder / "ours.json"),
    ]
    return result([sys.executable, "-m", "hpc_serve.cli", "bench", options.service, *words], folder / "ours.json", {})


def result(argv: list[str], path: Path, variables: Any) -> dict[str, Any]:
    done = subprocess.run(argv, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_against_vllm", description=__doc__)
    parser.add_argument("service")
    parser.add_argument("--tokenizer", required=True, help="the model's folder, for vLLM's prompts")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the results of all rounds")
    options = parser.parse_args()
    runs = {"ours": run_ours, "vllm": run_vllm}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(options.rounds):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(runs[name](options, 1000 * number + len(name), Path(folder)))
            last = results[name][-1]
            print(f"round {number + 1}, {name}: {last['output_throughput']:.1f} tokens/s, {last['failed']} failed")
    print(f"\n{'median of ' + str(options.rounds):<26}{'ours':>10}{'vllm':>10}{'ratio':>8}")
    for figure in FIGURES:
        ours, vllm = (statistics.median(one[figure] for one in results[name]) for name in ("ours", "vllm"))
        print(f"{figure:<26}{ours:>10.2f}{vllm:>10.2f}{ours / vllm:>8.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
