"""Which folder of caches a run gets: one that nobody else uses at the time, and that nobody else can have changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from hpc_serve.job.cache import engine_cache
from hpc_serve.job.cache.engine_cache import lock_folder, remove_unused
from hpc_serve.job.machine.guarded_folders import READY, folder_bytes
from tests.support.refusals import refuse
from tests.support.strangers import give_away

KEY = "0123456789abcdef"
OTHER = "f" * 16


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "caches"
    path.mkdir(mode=0o700)
    return path


@contextlib.contextmanager
def locked(root, key=KEY):
    """The first free folder of a key, and the descriptor of its lock, as long as a run has it."""
    path, descriptor = lock_folder(root, key)
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)


def used_before(root, key=KEY, *, at_s: float, size: int = 0) -> Path:
    """A folder that a run has used, and that no run has now."""
    with locked(root, key) as (path, descriptor):
        (path / "graph").write_bytes(b"x" * size)
        os.utime(descriptor, (at_s, at_s))
    return path


def test_runs_at_the_same_time_have_a_folder_each(root):
    with locked(root) as first:
        with locked(root) as second, locked(root) as third:
            assert [path.name for path, _ in (first, second, third)] == [f"{KEY}-0", f"{KEY}-1", f"{KEY}-2"]
        with locked(root) as again:
            assert again[0] == second[0]


def test_a_run_goes_on_without_where_all_are_in_use(root, monkeypatch):
    monkeypatch.setattr(engine_cache, "_MOST_AT_ONCE", 1)
    with locked(root), pytest.raises(OSError, match="other runs use all folders"):
        lock_folder(root, KEY)


@pytest.mark.parametrize("what", ["folder", "file", "file below"])
def test_what_a_stranger_has_put_there_is_removed_before_use(root, what):
    path = used_before(root, at_s=1.0)
    (path / "vllm").mkdir()
    planted = path / "vllm" / "graph.so" if what == "file below" else path / "graph.so"
    planted.write_text("evil")
    give_away(path if what == "folder" else planted)
    with locked(root) as (found, _):
        assert (found, list(found.iterdir()), found.stat().st_uid) == (path, [], os.geteuid())


def test_what_others_could_have_written_to_is_removed_before_use(root):
    path = used_before(root, at_s=1.0)
    path.chmod(0o777)
    with locked(root):
        assert (list(path.iterdir()), stat.S_IMODE(path.stat().st_mode)) == ([], 0o700)


@pytest.mark.parametrize("kind", ["link", "file", "pipe in it"])
def test_what_is_no_folder_of_files_is_not_used(root, tmp_path, kind):
    path = root / f"{KEY}-0"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "graph.so").write_text("evil")
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
        os.mkfifo(path / "pipe")
    with locked(root):
        assert (path.is_symlink(), path.is_dir(), list(path.iterdir())) == (False, True, [])
    assert (elsewhere / "graph.so").exists()


def test_a_link_in_place_of_a_lock_is_not_followed(root, tmp_path):
    (root / f"{KEY}-0.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        lock_folder(root, KEY)
    assert not (tmp_path / "victim").exists()


def test_a_filesystem_without_locks_is_said(root, monkeypatch):
    refuse(monkeypatch, fcntl, "flock", errno.ENOLCK)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        lock_folder(root, KEY)


def test_those_used_last_stay_within_the_bound(root):
    now = Path("/proc/self").stat().st_mtime
    old = used_before(root, "a" * 16, at_s=now - 300, size=100_000)
    middle = used_before(root, "b" * 16, at_s=now - 200, size=100_000)
    last = used_before(root, "c" * 16, at_s=now - 100, size=100_000)
    assert remove_unused(root, limit_bytes=3 * folder_bytes(last)) == []
    assert remove_unused(root, limit_bytes=2 * folder_bytes(last)) == [old]
    assert (old.exists(), old.with_name(f"{old.name}.lock").exists()) == (False, False)
    assert remove_unused(root, limit_bytes=1) == [middle, last]
    assert list(root.iterdir()) == []


def test_what_is_in_use_stays_though_it_is_too_large(root):
    path = used_before(root, at_s=1.0, size=100_000)
    with locked(root):
        assert remove_unused(root, limit_bytes=1) == []
    assert remove_unused(root, limit_bytes=1) == [path]


def test_what_nobody_used_for_a_month_is_removed(root):
    old = used_before(root, at_s=1.0)
    assert remove_unused(root, limit_bytes=1 << 40) == [old]


def test_only_folders_of_caches_are_removed(root):
    for name in ("notes", f"{KEY}-x", "vllm"):
        (root / name).mkdir()
    (root / f"{OTHER}.lock").write_text("")
    assert remove_unused(root, limit_bytes=0) == []
    assert sorted(path.name for path in root.iterdir()) == sorted(["notes", f"{KEY}-x", "vllm", f"{OTHER}.lock"])


def test_a_lock_that_was_removed_meanwhile_is_made_anew(root, monkeypatch):
    """Between the opening of a lock's file and the lock somebody may remove folder and file."""
    flock = fcntl.flock
    removed: list[int] = []

    def remove_first(descriptor, operation):
        if not removed:
            removed.append(1)
            (root / f"{KEY}-0.lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(root) as (_, descriptor):
        assert os.path.samestat(os.fstat(descriptor), (root / f"{KEY}-0.lock").stat())


def test_a_removal_that_is_interrupted_leaves_nothing_that_counts_as_ready(root, monkeypatch):
    path = used_before(root, at_s=1.0)
    (path / READY).write_text("")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_unused(root, limit_bytes=1 << 40)
    assert path.exists()
    assert not (path / READY).exists()
