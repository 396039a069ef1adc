"""Whether a run has the caches of an earlier one: those of this machine with which an engine became ready."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cache import engine_cache
from hpc_serve.job.cache.engine_cache import cache_key, lock_folder, machine_key, open_cache, remove_unused
from hpc_serve.job.machine.allocation import Share
from hpc_serve.job.machine.guarded_folders import READY, folder_bytes
from hpc_serve.vllm.command import read_command
from tests.support.nodes import ALLOCATION, ALONE
from tests.support.refusals import refuse
from tests.support.strangers import give_away

KEY = "0123456789abcdef"


@pytest.fixture
def node_dir(tmp_path):
    return tmp_path / "hs-00000001"


@pytest.fixture
def environ(tmp_path):
    return {"HPC_SERVE_CACHE_DIR": str(tmp_path / "named"), "HPC_SERVE_HOME": str(tmp_path / "home")}


@pytest.fixture
def scratch(tmp_path):
    """A folder as /tmp is."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


def start(environ, node_dir, *, is_ready=True, key=KEY) -> tuple[bool, str]:
    """One run whose engine compiles: whether it was warm, and its words."""
    with open_cache(key, node_dir, environ, ALONE) as cache:
        graph = cache.path / "vllm" / "graph"
        assert graph.exists() == cache.is_warm
        graph.parent.mkdir(parents=True, exist_ok=True)
        graph.write_text("compiled")
        if is_ready:
            cache.note_ready()
        return cache.is_warm, cache.words


def test_the_second_start_is_warm_and_says_from_where(environ, node_dir):
    path = Path(environ["HPC_SERVE_CACHE_DIR"]) / f"{KEY}-0"
    assert start(environ, node_dir) == (False, f"cold, kept in {path} (no engine was ready with it yet)")
    assert start(environ, node_dir) == (True, f"warm, from {path} on this node")
    assert start(environ, node_dir, key="f" * 16)[0] is False


def test_what_an_engine_left_that_was_not_ready_is_not_used(environ, node_dir):
    start(environ, node_dir, is_ready=False)
    assert start(environ, node_dir)[0] is False
    assert start(environ, node_dir, is_ready=False)[0] is True
    assert start(environ, node_dir)[0] is True, "a start that was cancelled has damaged nothing"


def test_on_several_nodes_a_start_that_fails_leaves_nothing(environ, node_dir):
    def warm(*, is_ready: bool) -> bool:
        with open_cache(KEY, node_dir, environ, ALLOCATION) as cache:
            if is_ready:
                cache.note_ready()
            return cache.is_warm

    assert [warm(is_ready=ready) for ready in (True, True, False, True, False)] == [False, True, True, False, True]


def test_engines_on_one_node_do_not_fill_one_cache(environ, node_dir):
    for index in (1, 0):
        replica = replace(ALONE, share=Share(index=index, count=2))
        with open_cache(KEY, node_dir, environ, replica) as cache:
            assert cache.path.name == f"{KEY}-{index}"


def test_code_for_another_processor_is_not_used(environ, node_dir, monkeypatch):
    start(environ, node_dir)
    monkeypatch.setattr(engine_cache, "machine_key", lambda: "another")
    assert start(environ, node_dir)[1].endswith("(it was of another kind of machine)")


def test_the_engine_is_told_of_every_cache(environ, node_dir):
    with open_cache(KEY, node_dir, environ, ALONE) as cache:
        told = cache.environ()
    assert all(value == "1" or value.startswith(f"{cache.path}/") for value in told.values())
    assert set(told) == {
        *("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"),
        *("VLLM_XLA_CACHE_PATH", "VLLM_ENABLE_STARTUP_PLAN"),
    }


def test_it_can_be_switched_off(environ, node_dir):
    with open_cache(KEY, node_dir, {**environ, "HPC_SERVE_CACHE_SIZE": "0"}, ALONE) as cache:
        assert (cache.path, cache.is_warm) == (node_dir / "cache", False)
        assert cache.words == "cold, and not kept: HPC_SERVE_CACHE_SIZE=0"
        assert "VLLM_ENABLE_STARTUP_PLAN" not in cache.environ()
        cache.note_ready()
    assert not Path(environ["HPC_SERVE_CACHE_DIR"]).exists()


def test_a_size_that_is_none_is_refused(environ, node_dir):
    with (
        pytest.raises(InvalidRequestError, match=r"HPC_SERVE_CACHE_SIZE: 'much' is no size: .* 0 keeps nothing"),
        open_cache(KEY, node_dir, {**environ, "HPC_SERVE_CACHE_SIZE": "much"}, ALONE),
    ):
        pass


def test_where_nothing_was_named_it_lies_beside_the_runs_folders(scratch, node_dir):
    environ = {"HPC_SERVE_TMPDIR": str(scratch), "HPC_SERVE_HOME": str(scratch / "home")}
    start(environ, node_dir)
    root = scratch / f"hpc-serve-cache-{os.geteuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert start(environ, node_dir) == (True, f"warm, from {root}/{KEY}-0 on this node")


@pytest.mark.parametrize("attack", ["a stranger's folder", "an open folder", "a link", "a file", "no sticky bit"])
def test_a_folder_that_a_stranger_made_first_is_not_used(scratch, node_dir, tmp_path, attack):
    """Its name is known to everybody. The run goes on in its private folder, and says why."""
    root = scratch / f"hpc-serve-cache-{os.geteuid()}"
    planted = root
    if attack == "a link":
        planted = tmp_path / "strangers"
        root.symlink_to(planted)
    if attack == "a file":
        root.write_text("")
    else:
        (planted / f"{KEY}-0" / "vllm").mkdir(parents=True)
        (planted / f"{KEY}-0" / "vllm" / "graph").write_text("evil")
        (planted / f"{KEY}-0" / "ready").write_text(machine_key())
        planted.chmod(0o777 if attack == "an open folder" else 0o700)
    if attack == "no sticky bit":
        scratch.chmod(0o777)
    if attack in ("a stranger's folder", "a link"):
        give_away(planted)
    with open_cache(
        KEY, node_dir, {"HPC_SERVE_TMPDIR": str(scratch), "HPC_SERVE_HOME": str(scratch / "home")}, ALONE
    ) as cache:
        assert (cache.path, cache.is_warm, cache.lock) == (node_dir / "cache", False, None)
        assert cache.words.startswith("cold, and not kept: ")
        assert str(root) in cache.words or str(planted) in cache.words or str(scratch) in cache.words
    if attack != "a file":
        assert (planted / f"{KEY}-0" / "vllm" / "graph").read_text() == "evil", "a stranger's files are let be"


def test_a_key_is_of_model_layout_and_versions(tmp_path):
    def key(words: str, **options) -> str:
        return cache_key(read_command(words.split()), **{"device": "GPU", "num_nodes": 1, **options})

    model = tmp_path / "model"
    model.mkdir()
    plain = key(f"vllm serve {model}")
    assert key(f"vllm serve {model} --served-model-name x --port 8000") == plain
    assert len({plain, key(f"vllm serve {model} -tp 2"), key(f"vllm serve {model}", num_nodes=2)}) == 3
    (model / "config.json").write_text("{}")
    assert key(f"vllm serve {model}") != plain


def test_a_machine_is_its_processor_and_gpus(tmp_path):
    cpus, gpus = tmp_path / "cpuinfo", tmp_path / "gpus"
    cpus.write_text("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 2000\n")
    before = machine_key(cpus=cpus, gpus=gpus)
    cpus.write_text("model name\t: A\nflags\t\t: avx2\ncpu MHz\t\t: 3000\n")
    assert machine_key(cpus=cpus, gpus=gpus) == before
    (gpus / "0").mkdir(parents=True)
    (gpus / "0" / "information").write_text("Model: \t\t H100\nIRQ:   1\n")
    with_gpu = machine_key(cpus=cpus, gpus=gpus)
    cpus.write_text("model name\t: A\nflags\t\t: avx2 avx512f\n")
    assert len({before, with_gpu, machine_key(cpus=cpus, gpus=gpus)}) == 3


# -- Which folder of caches a run gets: one that nobody else uses at the time, and that nobody else can have changed


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


@pytest.mark.parametrize("what", ["folder", "file", "file below", "in an open folder"])
def test_what_a_stranger_has_or_could_have_put_there_is_removed_before_use(root, what):
    path = used_before(root, at_s=1.0)
    (path / "vllm").mkdir()
    planted = path / "vllm" / "graph.so" if what == "file below" else path / "graph.so"
    planted.write_text("evil")
    if what == "in an open folder":
        path.chmod(0o777)
    else:
        give_away(path if what == "folder" else planted)
    with locked(root) as (found, _):
        assert (found, list(found.iterdir()), found.stat().st_uid) == (path, [], os.geteuid())
        assert stat.S_IMODE(found.stat().st_mode) == 0o700


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
