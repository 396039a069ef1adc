"""How fast weights are read cold: `python -m benchmarks.loading`. Ten minutes, no engine.

vLLM's own iterator over safetensors files, by each load strategy, beside `dd`. Each tensor is copied once, as into a
model. Before each turn the kernel forgets the files (posix_fadvise), so that all comes from the filesystem of --folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.common import Benchmark, Figures, Measured, run_alone, show
from hpc_serve.units import GIB, MIB

TENSOR_BYTES = 64 * MIB
STRATEGIES = ("lazy", "prefetch", "eager")


def make_shards(folder: Path, *, shards: int, shard_bytes: int) -> list[Path]:
    """Files of random bfloat16 tensors."""
    paths = []
    for number in range(1, shards + 1):
        count = shard_bytes // TENSOR_BYTES
        header = {
            f"layers.{number}.{place}.weight": {
                "dtype": "BF16",
                "shape": [TENSOR_BYTES // 2 // 4096, 4096],
                "data_offsets": [place * TENSOR_BYTES, (place + 1) * TENSOR_BYTES],
            }
            for place in range(count)
        }
        text = json.dumps(header).encode()
        path = folder / f"model-{number:05}-of-{shards:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _ in range(count):
                file.write(os.urandom(TENSOR_BYTES))
            os.fsync(file.fileno())
        paths.append(path)
    return paths


def forget(paths: list[Path]) -> None:
    """Have the kernel drop what it holds of the files."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(paths: list[Path], work: Callable[[], None]) -> Figures:
    forget(paths)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    work()
    took_s, size = time.perf_counter() - began_s, sum(path.stat().st_size for path in paths)
    return {"MiB/s": size / MIB / took_s, "CPU s a GiB": (time.process_time() - began_cpu_s) / (size / GIB)}


def dd(paths: list[Path]) -> None:
    for path in paths:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", "status=none"], check=True)


def load(paths: list[Path], strategy: str) -> None:
    """As vLLM's default loader reads them."""
    import torch
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    place = torch.empty(TENSOR_BYTES // 2, dtype=torch.bfloat16)
    for _, tensor in safetensors_weights_iterator([str(path) for path in paths], False, strategy):
        place.copy_(tensor.reshape(-1))


def measure(options: argparse.Namespace, measured: Measured) -> None:
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show(f"{options.shards} files of {options.shard_mib} MiB")
        paths = make_shards(Path(folder), shards=options.shards, shard_bytes=options.shard_mib * MIB)
        load(paths[:1], "lazy")  # imports
        turns: dict[str, Callable[[], Figures]] = {"dd": partial(cold, paths, partial(dd, paths))}
        turns |= {name: partial(cold, paths, partial(load, paths, name)) for name in STRATEGIES}
        case = f"{options.shards} files of {options.shard_mib} MiB, cold"
        measured.take_turns(case, turns, rounds=options.rounds, base="dd", warm=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where the files are made [default: the temporary folder]")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--shard-mib", type=int, default=1024)


BENCHMARK = Benchmark(
    name="loading", about=__doc__, measure=measure, rounds=5, options=add_options, needs="vLLM's package, and 4 GiB"
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
