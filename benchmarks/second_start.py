"""A first and a second start of one service: `python -m benchmarks.second_start`. About three minutes a round.

A tiny model is compiled and served by the real engine on this machine (vLLM on CPUs). Each round begins with empty
caches; `--starts` are made one after another, and after each the service is stopped. What is timed is from `submit` to
the ready record, and `start_s` of the record, from the launcher's beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Benchmark, Measured, run_alone, show, variables
from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.submit.request.options import Environment
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services import services
from hpc_serve.submit.services.stop import stop
from hpc_serve.submit.services.wait import wait
from hpc_serve.submit.status.status_reader import find
from hpc_serve.units import GIB
from hpc_serve.vllm.arguments import ARGS_FILE

SERVICE = "second-start"
FIGURES = {
    "submit to ready, s": "submit_to_ready_s",
    "launcher to ready, s": "start_s",
    "libraries compiled": "compiled",
}
_ENGINE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_ARGS = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "16777216")


def start(folder: Path) -> dict[str, Any]:
    """One start of the service and its end: its seconds, and how many libraries the engine has compiled."""
    store = ServiceStore(default_home(os.environ))
    began, began_at = time.monotonic(), time.time()
    submission = services.submit(
        ServeRequest(
            model=str(folder),
            service=SERVICE,
            gpu="cpu",
            gpu_memory_bytes=2 * GIB,
            cluster="local",
            engine_args=_ARGS,
            environment=Environment(kind="venv", path=sys.prefix),
        )
    )
    job_id = submission.job.job_id
    try:
        wait(store, SERVICE, job_id=job_id)
        seconds = time.monotonic() - began
        (record,) = [record for record in store.read(SERVICE).records if record.job_id == job_id]
    finally:
        stop(store, find(store, job_id))
    libraries = Path(os.environ["HPC_SERVE_CACHE_DIR"]).rglob("*.so")
    return {
        "submit_to_ready_s": round(seconds, 2),
        "start_s": round(record.measured["start_s"], 2),
        "compiled": sum(1 for path in libraries if path.stat().st_mtime >= began_at),
        "cache": record.cache,
    }


def measure(options: argparse.Namespace, measured: Measured) -> None:
    chosen = dict(one.split("=", 1) for one in options.set)
    settings = {"HPC_SERVE_CACHE_DIR": "{folder}/cache{round}", **chosen}
    seen: list[list[dict[str, Any]]] = [[] for _ in range(options.starts)]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = make_demo_model(folder / "model")
        (model / ARGS_FILE).unlink()
        for number in range(options.rounds):
            named = {name: value.format(round=number, folder=folder) for name, value in settings.items()}
            home = str(folder / f"home{number}")
            with variables(**{**_ENGINE, "HPC_SERVE_HOME": home, "HF_HOME": str(folder / "hf"), **named}):
                for index in range(options.starts):
                    found = start(model)
                    show(f"round {number + 1}, start {index + 1}: {json.dumps(found)}")
                    seen[index].append(found)
    for index, starts in enumerate(seen):
        caches = ", ".join(sorted({str(one["cache"]).partition(",")[0] for one in starts}))
        figures = {name: [one[key] for one in starts] for name, key in FIGURES.items()}
        measured.add("a service", f"start {index + 1}", figures, base="start 1", note=f"cache: {caches}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--starts", type=int, default=2, help="how often the service is started in a round")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the jobs")


BENCHMARK = Benchmark(
    name="second_start", about=__doc__, measure=measure, rounds=3, options=add_options, needs="a real engine"
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
