"""Logs: which files, their last lines, their new ones, and the engine's reports in them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.client.replicas.status import ReplicaStatus, assess_replica
from hpc_serve.submit import logs as module
from hpc_serve.submit.logs import files_of, follow, read_reports, tail
from tests.support.stubs import make_record


def of_job(job_id: str, folder: Path, **fields) -> ReplicaStatus:
    return assess_replica(make_record(job_id=job_id, log_dir=str(folder), **fields))


def test_the_batch_log_comes_first_and_nodes_in_their_order(tmp_path):
    for name in ("7-node10.log", "7-node2.log", "7.log", "77-node0.log", "70.log", "7-node2-ray.log"):
        (tmp_path / name).touch()
    status = of_job("7", tmp_path)
    assert [path.name for path in files_of(status)] == ["7.log", "7-node2.log", "7-node10.log"]
    assert [path.name for path in files_of(status, "engine", 10)] == ["7-node10.log"]
    assert [path.name for path in files_of(status, "ray")] == ["7-node2-ray.log"]
    (tmp_path / "own.out").touch()
    assert files_of(replace(status, batch_log=str(tmp_path / "own.out")))[0] == tmp_path / "own.out"
    assert files_of(of_job("8", tmp_path / "nowhere")) == []


def test_the_servers_of_one_job_share_the_logs_of_its_nodes(tmp_path):
    for name in ("7.log", "7-node0.log", "7-node1.log"):
        (tmp_path / name).touch()
    status = of_job("7", tmp_path, replica=1, replicas_per_job=2)
    assert [path.name for path in files_of(status)] == ["7.log", "7-node0.log", "7-node1.log"]
    (tmp_path / "7-1-node0.log").touch()
    assert [path.name for path in files_of(status)] == ["7.log", "7-1-node0.log"]


@pytest.mark.parametrize("size", [10, 200_000])
def test_the_last_lines_of_a_file_of_any_length(tmp_path, size):
    path = tmp_path / "log"
    path.write_text("x" * size + "\nü\nlast")
    assert tail(path, 2) == ["ü", "last"]
    assert tail(path, 0) == []
    assert tail(tmp_path / "none", 5) == []


def test_new_lines_and_new_files_come_until_the_job_is_over(tmp_path):
    batch, node = tmp_path / "7.log", tmp_path / "7-node0.log"
    batch.write_text("a\nb\npart")
    steps = iter(range(100))

    def is_over() -> bool:
        step = next(steps)
        if step == 0:
            with batch.open("a") as file:
                file.write("ial\nc\n")
        elif step == 1:
            node.write_text("first\nwithout an end")
        return step == 2

    lines = follow(lambda: files_of(of_job("7", tmp_path)), first_lines=2, is_over=is_over)
    seen = [(path.name, line) for path, line in lines]
    assert seen == [
        ("7.log", "a"),
        ("7.log", "b"),
        ("7.log", "partial"),
        ("7.log", "c"),
        ("7-node0.log", "first"),
        ("7-node0.log", "without an end"),
    ]


class CountedFile(io.BufferedReader):
    """An open file that counts what is read of it, and remembers the longest answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.read_bytes = self.longest = 0

    def read(self, size: int | None = -1) -> bytes:
        return self._noted(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._noted(super().readline(size))

    def _noted(self, content: bytes) -> bytes:
        self.read_bytes += len(content)
        self.longest = max(self.longest, len(content))
        return content


@pytest.fixture
def no_line_ends(tmp_path, monkeypatch):
    """A log of one line, longer than any that is read as one; the files that were opened."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(module, "_LONGEST_LINE_BYTES", 1_000)
    monkeypatch.setattr(module, "_TAIL_BYTES", 5_000)
    monkeypatch.setattr(module, "_TAIL_LINE_BYTES", 10)
    path, opened = tmp_path / "7.log", []
    path.write_bytes(b"x" * 60_000 + b"end")

    def counted(self, how):
        opened.append(CountedFile(self))
        return opened[-1]

    monkeypatch.setattr(type(tmp_path), "open", counted)
    return path, opened


def test_of_a_line_without_end_its_end_alone_is_read(no_line_ends):
    path, opened = no_line_ends
    (line,) = tail(path, 100)
    assert line.endswith("xend")
    assert len(line) == opened[0].read_bytes == 6_000


def test_a_line_without_end_comes_in_pieces_and_each_byte_once(no_line_ends):
    path, opened = no_line_ends
    found: Iterator[list[Path]] = iter([[]])  # it appears after the first look, so it is read from its beginning
    lines = [line for _, line in follow(lambda: next(found, [path]), first_lines=0, is_over=lambda: True)]
    assert "".join(lines) == "x" * 60_000 + "end"
    assert max(one.longest for one in opened) <= 1_000
    assert sum(one.read_bytes for one in opened) < 61_000


LOG = (Path(__file__).parent / "head.log").read_bytes().decode()
"""As real vLLM 0.32 and the launcher wrote it, shortened; shards have no time of their own."""
NEAR = time.mktime((2026, 11, 22, 15, 0, 0, 0, 0, -1))


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "7-node0.log"
    path.write_text(LOG)
    return path


def test_reports_of_one_moment_are_one(log):
    (first_at, first), (second_at, second) = read_reports(log, near=NEAR)
    assert first_at == time.mktime((2026, 11, 22, 14, 19, 46, 0, 0, -1))
    assert second_at - first_at == 10
    assert (first.generation_tokens_per_s, first.running, first.waiting) == (125.2, 9, 2)
    assert (second.generation_tokens_per_s, second.running) == (9.0, 0)


def test_of_several_runs_of_a_job_the_last_counts(log):
    log.write_text(LOG + LOG.splitlines()[0].replace("14:05:13", "16:00:00") + "\n")
    assert read_reports(log, near=NEAR) == ()


def test_a_run_over_the_end_of_a_year(tmp_path):
    path = tmp_path / "log"
    path.write_text(LOG.replace("11-22 14:19:46", "12-31 23:59:56").replace("11-22 14:19:56", "01-01 00:00:06"))
    (first_at, _), (second_at, _) = read_reports(path, near=time.mktime((2027, 1, 1, 1, 0, 0, 0, 0, -1)))
    assert first_at == time.mktime((2026, 12, 31, 23, 59, 56, 0, 0, -1))
    assert second_at - first_at == 10


def test_of_a_long_log_both_ends_are_read(log):
    reports = LOG.splitlines(keepends=True)[-3:]
    log.write_text(reports[0] + "noise\n" * 2000 + reports[2])
    found = read_reports(log, near=NEAR, head_bytes=len(reports[0]) - 1, tail_bytes=400)
    assert [one.generation_tokens_per_s for _, one in found] == [124.2, 9.0]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00" * 1000, b"2026-99-99 99:99:99 n INFO hpc-serve: launcher of x\n"]
)
def test_a_log_that_is_none_tells_nothing_or_little(tmp_path, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    assert read_reports(path, near=NEAR) == ()
    assert read_reports(tmp_path / "none", near=NEAR) == ()
