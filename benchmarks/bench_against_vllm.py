"""`hpc-serve bench` beside `vllm bench serve` on one endpoint: `python -m benchmarks.bench_against_vllm`.

The two run in turns with the same lengths, number of requests and concurrency; both get prompts of their own in each
round, so that no cache of prefixes helps. The first endpoint is a stub engine with a pace of its own: so many ms to the
first token, so many from token to token. `of the pace` is what was measured of what it would send if all who measure
took no time. The second is a tiny model's, served by the real engine on this machine, of which throughput alone is
compared: that engine often sends the tokens of a stream all at once, so that times from token to token mean little.
A service of one's own (`--service`) must have one replica, since `vllm bench serve` asks one address.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import Benchmark, Figures, Measured, run_alone, variables
from hpc_serve.client import endpoint
from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services import services
from hpc_serve.submit.services.stop import stop
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.status.status_reader import find
from hpc_serve.units import GIB
from tests.support.stubs import StubService

ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
THEIRS, OURS = "vllm bench serve", "hpc-serve bench"
REAL = {"input_len": 256, "output_len": 32}

THROUGHPUT = {"requests/s": "request_throughput", "output tokens/s": "output_throughput"}
TIMES = {
    "median TTFT, ms": "median_ttft_ms",
    "median TPOT, ms": "median_tpot_ms",
    "median ITL, ms": "median_itl_ms",
    "mean TPOT, ms": "mean_tpot_ms",
}
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


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked in a run; lengths in tokens."""

    input_len: int
    output_len: int
    num_prompts: int
    max_concurrency: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len} tokens, {self.num_prompts} requests, {self.max_concurrency} at once"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the stub engine takes to the first token, and from token to token, in ms."""

    first_ms: float
    token_ms: float

    def rate(self, load: Load) -> float:
        """Output tokens/s of senders that take no time. It takes as long after the last token as after each other."""
        answer_s = 1e-3 * (self.first_ms + load.output_len * self.token_ms)
        return load.max_concurrency * load.output_len / answer_s


@dataclass(frozen=True, kw_only=True)
class Target:
    """A service of one replica, its model's folder, and which figures of it are compared."""

    what: str
    service: str
    tokenizer: str
    figures: Mapping[str, str]
    pace: Pace | None = None


class Runner(Protocol):
    """Makes one run and writes its result."""

    def run(self, load: Load, seed: int, path: Path) -> None: ...


class Vllm:
    """`vllm bench serve`, in one process that runs it as often as it is told to."""

    def __init__(self, target: Target) -> None:
        self.tokenizer = target.tokenizer
        self.endpoint = endpoint(target.service)
        environ = {**os.environ, **self.endpoint.variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", VLLM],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, load: Load, seed: int, path: Path) -> None:
        words = ["--backend", "openai", "--base-url", self.endpoint.base_url.removesuffix("/v1")]
        words += ["--endpoint", "/v1/completions", "--model", self.endpoint.model, "--tokenizer", self.tokenizer]
        words += ["--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
        words += ["--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len)]
        words += ["--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.max_concurrency)]
        words += ["--seed", str(seed), "--save-result", "--result-filename", str(path)]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(shlex.join(words), file=self.process.stdin)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line == "DONE\n":
                return
        raise SystemExit("".join(said[-40:]))

    def close(self) -> None:
        """Closing its input ends it."""
        self.process.communicate()


class Ours:
    """`hpc-serve bench`, a process for each round. It keeps what each run said of its own share."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.results: dict[Load, list[dict[str, Any]]] = {}

    def run(self, load: Load, seed: int, path: Path) -> None:
        words = ["--lengths", f"{load.input_len}/{load.output_len}", "--num-prompts", str(load.num_prompts)]
        words += ["--max-concurrency", str(load.max_concurrency), "--seed", str(seed), "--save", str(path)]
        argv = [sys.executable, "-m", "hpc_serve.cli", "bench", self.service, *words]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.results.setdefault(load, []).append(json.loads(path.read_text()))

    def share(self, load: Load) -> str:
        """How busy it was, and whether it said that it was too busy."""
        runs = self.results[load]
        busy = statistics.median(run["client_busy"] for run in runs)
        notes = [note for run in runs for note in run["notes"] if "this program" in note.lower()]
        said = (
            f"{len(notes)} of {len(runs)} runs said so below their figures: {notes[-1]}" if notes else "no run noted it"
        )
        return f"{OURS} was busy {busy:.0%} of the time in the median; {said.rstrip('.')}"


def compare(target: Target, loads: Sequence[Load], rounds: int, measured: Measured) -> None:
    """Both in turns, load after load."""
    seeds = count(1)

    def turn(runner: Runner, load: Load) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            runner.run(load, next(seeds), path)
            last: dict[str, Any] = json.loads(path.read_text())
        if last["completed"] != load.num_prompts:
            raise SystemExit(f"{last['completed']} of {load.num_prompts} requests were answered: {last}")
        found = {name: last[key] for name, key in target.figures.items()}
        if target.pace is not None:
            found["of the pace"] = last["output_throughput"] / target.pace.rate(load)
        return found

    ours = Ours(target.service)
    with contextlib.closing(Vllm(target)) as theirs:
        for load in loads:
            case = f"{target.what}, {load}"
            turns = {THEIRS: partial(turn, theirs, load), OURS: partial(turn, ours, load)}
            measured.take_turns(case, turns, rounds=rounds, base=THEIRS)
            measured.notes.append(f"{case}: {ours.share(load)}.")


@contextlib.contextmanager
def stub_service(home: Path, pace: Pace) -> Iterator[str]:
    """The name of a service whose one engine is a stub with a pace."""
    service = StubService(home, f"paced-{pace.token_ms:g}")
    try:
        service.start("--stub-first-s", str(pace.first_ms / 1e3), "--stub-word-s", str(pace.token_ms / 1e3))
        yield service.service
    finally:
        service.close()


@contextlib.contextmanager
def real_service(home: Path, model: str, service: str) -> Iterator[str]:
    """The name of a service of a tiny model, served by the real engine."""
    store = ServiceStore(home)
    request = ServeRequest(
        model=model,
        service=service,
        gpu="cpu",
        gpu_memory_bytes=2 * GIB,
        cluster="local",
        environment=Environment(kind="venv", path=sys.prefix),
    )
    job_id = services.submit(request).job.job_id
    try:
        wait(store, service, job_id=job_id)
        yield service
    finally:
        stop(store, find(store, job_id))


def measure(options: argparse.Namespace, measured: Measured) -> None:
    lengths = {"input_len": options.input_len, "output_len": options.output_len}
    loads = [Load(**lengths, num_prompts=options.each * most, max_concurrency=most) for most in options.max_concurrency]
    everything = {**THROUGHPUT, **TIMES}
    if options.service:
        own = Target(what="your service", service=options.service, tokenizer=options.tokenizer, figures=everything)
        compare(own, loads, options.rounds, measured)
        return
    with tempfile.TemporaryDirectory() as root:
        folder, home = Path(root), Path(root) / "home"
        model = str(make_demo_model(folder / "model"))
        with variables(**ENGINE, HPC_SERVE_HOME=str(home), HF_HOME=f"{folder}/hf"):
            for token_ms in options.token_ms if "stub" in options.endpoint else ():
                pace = Pace(first_ms=options.first_ms, token_ms=token_ms)
                with stub_service(home, pace) as name:
                    what = f"a stub, {pace.first_ms:g} ms to the first token, {pace.token_ms:g} ms a token"
                    target = Target(what=what, service=name, tokenizer=model, figures=everything, pace=pace)
                    compare(target, loads, options.rounds, measured)
            if "real" in options.endpoint:
                loads = [Load(**REAL, num_prompts=32, max_concurrency=most) for most in options.real_concurrency]
                with real_service(home, model, "bench") as name:
                    target = Target(what="the real engine", service=name, tokenizer=model, figures=THROUGHPUT)
                    compare(target, loads, options.rounds, measured)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service", help="one of your own")
    parser.add_argument("--tokenizer", help="the folder of its model, for vLLM's prompts")
    parser.add_argument("--endpoint", choices=["stub", "real"], nargs="+", default=["stub", "real"])
    parser.add_argument("--max-concurrency", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--real-concurrency", type=int, nargs="+", default=[1, 8], help="with the real engine")
    parser.add_argument("--each", type=int, default=8, help="requests of a run for each that is under way at once")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--first-ms", type=float, default=100.0, help="the stub's, to the first token")
    parser.add_argument("--token-ms", type=float, nargs="+", default=[20.0], help="the stub's, from token to token")


BENCHMARK = Benchmark(
    name="bench_against_vllm", about=__doc__, measure=measure, rounds=7, options=add_options, needs="a real engine"
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
