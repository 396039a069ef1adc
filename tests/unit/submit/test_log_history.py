"""The engine's reports, by the log of its head."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_serve.submit.logs import read_reports

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
