"""Logs: which files, their last lines, and their new ones."""

from __future__ import annotations

import pytest

from hpc_serve.submit.log_files import follow, log_files, tail


def test_the_batch_log_comes_first_and_nodes_in_their_order(tmp_path):
    for name in ("7-node10.log", "7-node2.log", "7.log", "77-node0.log", "70.log"):
        (tmp_path / name).touch()
    assert [path.name for path in log_files("7", tmp_path)] == ["7.log", "7-node2.log", "7-node10.log"]
    (tmp_path / "own.out").touch()
    assert log_files("7", tmp_path, tmp_path / "own.out")[0] == tmp_path / "own.out"
    assert log_files("8", tmp_path / "nowhere") == []


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

    lines = follow(lambda: log_files("7", tmp_path), first_lines=2, is_over=is_over)
    seen = [(path.name, line) for path, line in lines]
    assert seen == [
        ("7.log", "a"),
        ("7.log", "b"),
        ("7.log", "partial"),
        ("7.log", "c"),
        ("7-node0.log", "first"),
        ("7-node0.log", "without an end"),
    ]
