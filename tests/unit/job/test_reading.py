"""What processes read is seen however they read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_serve.job.machine.process import mark_environ
from hpc_serve.job.progress.checkpoint import weight_sizes
from hpc_serve.job.progress.reading import ReadSoFar, RunReading
from hpc_serve.sizes import MIB

SIZE = 32 * MIB


def read_in_a_process(name: str, code: str, *words: str) -> tuple[ReadSoFar, ReadSoFar]:
    """What is counted of a process before and after it has run `code`."""
    mark = f"test-{os.getpid()}-{name}"
    wrapped = f"import sys; print('begun', flush=True); sys.stdin.readline()\n{code}\nprint('done', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{wrapped}\nsys.stdin.read()", *words],
        env={**os.environ, **mark_environ(mark)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    reading = RunReading(mark)
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"begun\n"
        before = reading.look()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"done\n"
        return before, reading.look()
    finally:
        process.communicate(b"")


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    return path


def test_what_marked_processes_read_is_counted():
    before, after = read_in_a_process("reader", "kept = open('/dev/zero', 'rb').read(10_000_000)")
    assert after.by_read - before.by_read >= 10_000_000


def test_a_mapped_file_is_counted_though_no_byte_comes_by_read_or_from_a_disk(weights):
    """As vLLM loads weights that the page cache has, or that lie on FUSE."""
    code = "import mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])"
    before, after = read_in_a_process("mapper", code, str(weights))
    assert after.mapped - before.mapped >= 0.9 * SIZE
    assert after.by_read - before.by_read < SIZE / 2


def test_what_was_mapped_stays_counted_when_it_is_unmapped(weights):
    mark = f"test-{os.getpid()}-unmapper"
    code = (
        "import mmap, sys\nf = open(sys.argv[1], 'rb')\n"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); sum(m[::4096])\n"
        "print('mapped', flush=True); sys.stdin.readline(); m.close(); print('closed', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(weights)],
        env={**os.environ, **mark_environ(mark)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        reading = RunReading(mark)
        assert process.stdout.readline() == b"mapped\n"
        mapped = reading.look().mapped
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"closed\n"
        assert reading.look().mapped >= mapped >= 0.9 * SIZE
    finally:
        process.communicate(b"")


def test_counts_of_nodes_are_added():
    both = ReadSoFar(by_read=1, from_disk=2, mapped=3) + ReadSoFar(by_read=10, mapped=30)
    assert (both, both.total) == (ReadSoFar(by_read=11, from_disk=2, mapped=33), 46)


def test_files_of_weights_are_in_the_order_in_which_they_are_loaded(tmp_path):
    for number in (10, 2, 1):
        (tmp_path / f"part-{number}.safetensors").write_bytes(b"w" * number)
    assert weight_sizes(tmp_path) == [1, 2, 10]
