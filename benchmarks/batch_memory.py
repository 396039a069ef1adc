"""The memory that a batch takes, by the lines of its file: `python -m benchmarks.batch_memory`. Ten minutes; no engine.

`hpc_serve.batch.run` answers a file by two stub engines, in a process of its own. Beside the rate is the most memory
that the process had (VmHWM), and the CPU time a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import Benchmark, Figures, Measured, run_alone, variables
from tests.support.stubs import StubService

CODE = """\
import asyncio, re, sys, time
from hpc_serve import batch

async def main():
    async for answer in batch.run(sys.argv[1], sys.argv[2], service="405b"):
        last = answer.progress
    assert last.answered == last.total, last
    return last

began_s, cpu_s = time.monotonic(), time.process_time()
last = asyncio.run(main())
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(peak, last.total / (time.monotonic() - began_s), 1000 * (time.process_time() - cpu_s) / last.total)
"""


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with variables(HPC_SERVE_HOME=str(folder / "home")):
            service = StubService(folder / "home")
            try:
                for _ in range(2):
                    service.start(predicted={"max_num_seqs": 16.0})
                turns = {f"{lines:,} lines": partial(_answer, folder, lines) for lines in options.lines}
                base = f"{options.lines[0]:,} lines"
                measured.take_turns("chat, 8 tokens", turns, rounds=options.rounds, base=base, warm=False)
            finally:
                service.close()


def _answer(folder: Path, lines: int) -> Figures:
    requests, output = folder / "in.jsonl", folder / "out.jsonl"
    with requests.open("w") as file:
        for number in range(lines):
            body = {"messages": [{"role": "user", "content": f"Line {number}?"}], "max_tokens": 8}
            file.write(json.dumps({"custom_id": f"q{number}", "url": "/v1/chat/completions", "body": body}) + "\n")
    argv = [sys.executable, "-c", CODE, str(requests), str(output)]
    peak, rate, cpu = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert len({json.loads(line)["custom_id"] for line in output.open()}) == lines
    output.unlink()
    return {"MiB": int(peak) / 1024, "lines/s": float(rate), "CPU ms a line": float(cpu)}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000], metavar="N")


BENCHMARK = Benchmark(
    name="batch_memory", about=__doc__, measure=measure, rounds=1, options=_options, short={"lines": [50, 100]}
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
