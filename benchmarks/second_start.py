"""A first and a second start of one service: `python -m benchmarks.second_start`. About three minutes a round.

A tiny model is compiled and served by the real engine on this machine (vLLM on CPUs). Each round begins with empty
caches; `--starts` are made one after another, and after each the service is stopped. What is timed is from `submit` to
the ready record, and `start_s` of the record, from the launcher's beginning. Each figure is a median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_serve.demo_model import make_demo_model
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.sizes import GIB
from hpc_serve.submit import services
from hpc_serve.submit.request import Environment, ServeRequest
from hpc_serve.submit.status_reader import find
from hpc_serve.submit.stop import stop
from hpc_serve.submit.wait import wait

SERVICE = "second-start"
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


@contextlib.contextmanager
def variables(**added: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(folder: Path, *, rounds: int, starts: int, settings: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """By round, the starts."""
    model = make_demo_model(folder / "model")
    (model / "hpc-serve-args.txt").unlink()
    found: list[list[dict[str, Any]]] = []
    settings = {"HPC_SERVE_CACHE_DIR": "{folder}/cache{round}", **settings}
    for number in range(rounds):
        named = {name: value.format(round=number, folder=folder) for name, value in settings.items()}
        home = str(folder / f"home{number}")
        with variables(**{**_ENGINE, "HPC_SERVE_HOME": home, "HF_HOME": str(folder / "hf"), **named}):
            found.append([])
            for index in range(starts):
                found[-1].append(start(model))
                print(f"round {number}, start {index + 1}: {json.dumps(found[-1][-1])}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2, help="how often the service is started in a round")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the jobs")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    options = parser.parse_args()
    settings = dict(one.split("=", 1) for one in options.set)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), rounds=options.rounds, starts=options.starts, settings=settings)
    firsts = statistics.median(one[0]["start_s"] for one in found)
    for index in range(options.starts):
        seconds = [one[index]["start_s"] for one in found]
        median = statistics.median(seconds)
        compiled = sum(one[index]["compiled"] for one in found)
        print(
            f"start {index + 1}: {median:.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), "
            f"{median / firsts:.2f} of the first, {compiled} libraries compiled"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
