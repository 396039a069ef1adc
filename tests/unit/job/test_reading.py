"""What processes read is seen however they read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.progress import ReadSoFar, RunReading, weight_sizes
from hpc_serve.units import MIB

SIZE = 32 * MIB


def looks_at(name: str, *steps: str, words: tuple[str, ...] = ()) -> list[ReadSoFar]:
    """What is counted of a process before its first step, and after each of them."""
    mark = f"test-{os.getpid()}-{name}"
    lines = [line for step in ("pass", *steps) for line in (step, "print(flush=True)", "sys.stdin.readline()")]
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(["import mmap, sys", *lines]), *words],
        env={**os.environ, **mark_environ(mark)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    reading, found = RunReading(mark), []
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdin, process.stdout:
        for _ in range(len(steps) + 1):
            assert process.stdout.readline() == b"\n"
            found.append(reading.look())
            process.stdin.write(b"\n")
            process.stdin.flush()
    process.wait()
    return found


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    return path


def test_what_marked_processes_read_is_counted():
    before, after = looks_at("reader", "kept = open('/dev/zero', 'rb').read(10_000_000)")
    assert after.by_read - before.by_read >= 10_000_000


MAP = "f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])"


def test_a_mapped_file_is_counted_though_no_byte_comes_by_read_and_stays_counted_when_it_is_unmapped(weights):
    """As vLLM loads weights that the page cache has, or that lie on FUSE."""
    before, mapped, closed = looks_at("mapper", MAP, "m.close()", words=(str(weights),))
    assert closed.mapped - before.mapped >= mapped.mapped - before.mapped >= 0.9 * SIZE
    assert mapped.by_read - before.by_read < SIZE / 2


def test_counts_of_nodes_are_added():
    both = ReadSoFar(by_read=1, from_disk=2, mapped=3) + ReadSoFar(by_read=10, mapped=30)
    assert (both, both.total) == (ReadSoFar(by_read=11, from_disk=2, mapped=33), 46)


def test_files_of_weights_are_in_the_order_in_which_they_are_loaded(tmp_path):
    for number in (10, 2, 1):
        (tmp_path / f"part-{number}.safetensors").write_bytes(b"w" * number)
    assert weight_sizes(tmp_path) == [1, 2, 10]
