"""What of /dev/shm is a run's: what its processes have mapped, as long as it is the same file and nobody uses it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
from pathlib import Path

import pytest

from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import Segment
from tests.support.strangers import give_away


@pytest.fixture
def tmp_path():
    """A folder in memory, as /dev/shm is: other filesystems may show another device in a process's maps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def segment(tmp_path):
    """Makes a file of a given name in a stand-in for /dev/shm."""

    def make(name):
        path = tmp_path / name
        path.write_bytes(b"\0" * mmap.PAGESIZE)
        return Segment(name, path.stat().st_ino)

    return make


def mapping(path):
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_what_a_process_has_mapped_is_seen_by_name_and_inode(tmp_path, segment):
    mapped, other = segment("psm_1234"), segment("psm_5678")
    held = mapping(tmp_path / mapped.name)
    again = Segment(mapped.name, mapped.inode + 1)
    assert node_dir.mapped_by([os.getpid()], [mapped, other, again], folder=tmp_path) == {mapped}
    held.close()


def test_a_file_of_the_same_number_in_another_memory_is_another_file(tmp_path, segment, monkeypatch):
    """A container's /dev/shm: its processes do not keep what a killed engine left in the node's."""
    left = segment("psm_1234")
    held = mapping(tmp_path / left.name)
    assert node_dir.remove_segments([left], folder=tmp_path) == []
    monkeypatch.setattr(node_dir, "_device_of", lambda folder: "0:0")
    assert node_dir.remove_segments([left], folder=tmp_path) == [left]
    held.close()


def test_a_semaphore_that_was_mapped_before_it_got_its_name_is_seen():
    """As Python's, for processes that it spawns."""
    before = node_dir.list_segments()
    semaphore = multiprocessing.get_context("spawn").Lock()
    (made,) = node_dir.mapped_by([os.getpid()], node_dir.list_segments() - before)
    assert made.name.startswith("sem.mp-")
    del semaphore


def test_a_process_that_has_ended_has_nothing_mapped(tmp_path, segment):
    assert node_dir.mapped_by([2**22 + 1], [segment("psm_1234")], folder=tmp_path) == set()


def test_what_is_listed_is_of_known_kinds(tmp_path, segment):
    kinds = ("psm_1234", "vllm_offload_x.mmap", "vllm_dist_0e-tp:0-[0-1]-cpushm_0", "sem.mp-abc", "nccl-x", "torch_1_2")
    known = {segment(name) for name in kinds}
    segment("sem.mine")
    (tmp_path / "psm_folder").mkdir()
    (tmp_path / "psm_link").symlink_to(tmp_path / "psm_1234")
    assert node_dir.list_segments(folder=tmp_path) == known


def test_what_nobody_maps_is_removed_and_what_somebody_maps_is_not(tmp_path, segment):
    idle, used = segment("psm_idle"), segment("psm_used")
    held = mapping(tmp_path / used.name)
    assert node_dir.remove_segments([idle, used], folder=tmp_path) == [idle]
    assert os.listdir(tmp_path) == [used.name]
    held.close()


def test_another_file_under_the_same_name_is_not_removed(tmp_path, segment):
    now = segment("psm_1234")
    assert node_dir.remove_segments([Segment(now.name, now.inode + 1)], folder=tmp_path) == []
    assert (tmp_path / now.name).exists()


def test_a_name_that_leads_elsewhere_is_not_removed(tmp_path):
    (tmp_path / "shm").mkdir()
    victim = tmp_path / "psm_victim"
    victim.write_text("x")
    assert node_dir.remove_segments([Segment("../psm_victim", victim.stat().st_ino)], folder=tmp_path / "shm") == []
    assert victim.exists()


def test_another_users_segment_is_neither_listed_nor_removed(tmp_path, segment):
    theirs = segment("psm_1234")
    give_away(tmp_path / theirs.name)
    assert node_dir.list_segments(folder=tmp_path) == set()
    assert node_dir.remove_segments([theirs], folder=tmp_path) == []
