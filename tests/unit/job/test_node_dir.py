"""Whose a node-local folder is, and who may remove it: only what a dead launcher of this user left on this node."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import DirOwner, Segment, make_run_dir, remove_old_run_dirs, remove_run_dir
from hpc_serve.job.machine.allocation import read_allocation
from hpc_serve.job.machine.network import PortsInUseError
from hpc_serve.rendezvous.store import ServiceStore
from tests.support.refusals import refuse
from tests.support.strangers import give_away
from tests.support.stubs import make_record

OWNER = DirOwner(run_mark="hs-0000000a-0")


@pytest.fixture
def root(tmp_path):
    tmp_path.chmod(0o1777)
    return tmp_path


@pytest.fixture
def path(root):
    return root / "hs-0000000a"


@pytest.fixture
def abandoned(path):
    """A folder whose launcher is gone: the lock went with its descriptor."""
    os.close(node_dir.make(path, OWNER))
    return path


def judged(path):
    with node_dir.lock_abandoned(path) as owner:
        return owner


def test_a_folder_is_private_and_its_name_is_taken_once(path):
    lock = node_dir.make(path, OWNER)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    with pytest.raises(PortsInUseError, match="another name"):
        node_dir.make(path, OWNER)
    os.close(lock)


def test_a_folder_that_cannot_be_made_is_told_and_nothing_is_left(root, monkeypatch):
    with pytest.raises(InvalidRequestError, match="HPC_SERVE_TMPDIR"):
        node_dir.make(root / "absent" / "hs-0000000a", OWNER)
    refuse(monkeypatch, os, "write", errno.ENOSPC)
    with pytest.raises(InvalidRequestError, match="No space left on device"):
        node_dir.make(root / "hs-0000000a", OWNER)
    assert not list(root.iterdir())


def test_a_living_launchers_folder_is_nobody_elses(path):
    lock = node_dir.make(path, OWNER)
    assert judged(path) is None
    os.close(lock)
    assert judged(path) == OWNER


def test_two_sweeps_do_not_meet_in_one_folder(abandoned):
    with node_dir.lock_abandoned(abandoned) as first, node_dir.lock_abandoned(abandoned) as second:
        assert (first, second) == (OWNER, None)


def test_a_folder_that_another_sweep_has_just_removed_is_left_alone(abandoned, monkeypatch):
    """Its file was opened in time, and is locked only after it was unlinked."""
    with node_dir.lock_abandoned(abandoned):
        opened = os.open
        monkeypatch.setattr(os, "open", lambda *args: (opened(*args), (abandoned / "owner").unlink())[0])
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        assert judged(abandoned) is None


def test_without_locks_a_run_works_and_its_folder_is_never_judged(path, monkeypatch):
    refuse(monkeypatch, fcntl, "flock", errno.ENOLCK)
    assert node_dir.make(path, OWNER) is None
    assert judged(path) is None
    node_dir.remove(path, OWNER)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node": "x"}', '{"node": 1, "run_mark": 2, "more": 3}', None])
def test_an_owner_file_that_says_nothing_or_is_another_nodes_is_not_judged(abandoned, text, monkeypatch):
    """The lock of another node may be local to it."""
    if text is None:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    else:
        (abandoned / "owner").write_text(text)
    assert judged(abandoned) is None


def test_only_private_folders_of_our_names_are_found(root, abandoned):
    (root / "hs-0000000b").symlink_to(abandoned)
    (root / "hs-0000000c").write_text("a file")
    (root / "hs-0000000d").mkdir(mode=0o755)
    (root / "hs-mine").mkdir(mode=0o700)
    assert node_dir.list_private(root) == [abandoned]
    root.chmod(0o777)  # others may rename folders
    assert node_dir.list_private(root) == []


def test_another_users_folder_is_not_found(root, abandoned):
    give_away(abandoned)
    assert node_dir.list_private(root) == []


def test_what_is_removed_and_what_a_link_points_at_is_not(root, abandoned):
    elsewhere = root / "thesis"
    elsewhere.mkdir()
    (elsewhere / "chapter").write_text("one")
    (abandoned / "ray" / "session").mkdir(parents=True)
    (abandoned / "link").symlink_to(elsewhere)
    (abandoned / "ray" / "link").symlink_to(elsewhere)
    node_dir.remove(abandoned, OWNER)
    assert not abandoned.exists()
    assert (elsewhere / "chapter").read_text() == "one"


def test_what_is_left_half_done_can_be_finished(abandoned, monkeypatch):
    (abandoned / "cache").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a file that resists
    node_dir.remove(abandoned, OWNER)
    monkeypatch.undo()
    assert judged(abandoned) == OWNER
    node_dir.remove(abandoned, OWNER)
    assert not abandoned.exists()


def test_the_heads_run_dir_goes_with_its_folder_and_nothing_else_does(root, abandoned):
    run_dir, other = root / "jobs" / "1-r0-0000abcd", root / "data"
    run_dir.mkdir(parents=True)
    run_dir.chmod(0o700)
    other.mkdir(mode=0o700)
    node_dir.remove(abandoned, DirOwner(run_mark="m", run_dir=str(run_dir)))
    node_dir.remove(abandoned, DirOwner(run_mark="m", run_dir=str(other)))
    assert not run_dir.exists()
    assert other.exists()


def test_the_owner_file_holds_no_secret_and_names_the_node(abandoned):
    said = json.loads((abandoned / "owner").read_text())
    assert said == {"node": socket.gethostname(), "run_mark": OWNER.run_mark, "run_dir": None}


def test_the_watcher_and_the_launcher_list_segments_each_for_itself(tmp_path):
    first, second, third = (Segment(f"psm_{number}", number) for number in (1, 2, 3))
    assert node_dir.read_segments(tmp_path) == set()
    node_dir.write_segments(tmp_path, {first}, seen_by="launcher")
    node_dir.write_segments(tmp_path, {second}, seen_by="watcher")
    assert node_dir.read_segments(tmp_path) == {first, second}
    node_dir.write_segments(tmp_path, {third}, seen_by="launcher")  # a new start of the engine
    assert node_dir.read_segments(tmp_path) == {second, third}
    (tmp_path / "shared-memory-watcher").write_text("[[1")
    assert node_dir.read_segments(tmp_path) == {third}


# -- Whose run is over: its folder in the shared home goes, by what records say; every other stays


MINUTE_S, DAY_S = 60.0, 86_400.0


@pytest.fixture
def store(tmp_path):
    return ServiceStore(tmp_path / "home")


def run_dir(store, job_id, age_s):
    allocation = read_allocation({"HPC_SERVE_CLUSTER": "local", "HPC_SERVE_JOB_ID": job_id})
    path = make_run_dir(store.home, allocation)
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def record(store, job_id, state, age_s):
    then = time.time() - age_s
    store.write(make_record(job_id=job_id, state=state, started_at=then, updated_at=then))


@pytest.mark.parametrize(
    ("state", "silent_s", "is_over"),
    [
        ("ready", 5.0, False),
        ("starting", 6 * DAY_S, False),  # its job may be suspended
        ("ready", 8 * DAY_S, True),
        ("failed", 5 * MINUTE_S, False),  # it may still be ending, by another node's clock
        ("failed", 20 * MINUTE_S, True),
        ("stopped", 20 * MINUTE_S, True),
        (None, 6 * DAY_S, False),
        (None, 8 * DAY_S, True),
    ],
)
def test_a_run_is_over_by_its_record_or_after_a_week_of_silence(store, state, silent_s, is_over):
    path = run_dir(store, "12", max(silent_s, DAY_S))
    if state is not None:
        record(store, "12", state, silent_s)
    remove_old_run_dirs(store)
    assert path.exists() is not is_over


def test_an_earlier_run_of_a_requeued_job_is_over_and_the_present_one_is_not(store):
    record(store, "12", "stopped", DAY_S)
    old = run_dir(store, "12", DAY_S)
    now = old.rename(old.with_name(old.name.replace("-r0-", "-r1-")))
    old = run_dir(store, "12", DAY_S)
    remove_old_run_dirs(store)
    assert (old.exists(), now.exists()) == (False, True)


def test_what_is_no_folder_of_a_run_stays(store, tmp_path):
    store.ensure_service("8b")
    jobs, elsewhere = store.home / "jobs", tmp_path / "thesis"
    for path in (jobs, elsewhere, jobs / "notes", jobs / "1-r0-0000abcd"):
        path.mkdir(mode=0o755)
    (jobs / "2-r0-0000abcd").symlink_to(elsewhere)
    for path in jobs.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    os.utime(elsewhere, (0, 0))
    remove_old_run_dirs(store)
    assert sorted(path.name for path in jobs.iterdir()) == ["1-r0-0000abcd", "2-r0-0000abcd", "notes"]
    remove_run_dir(elsewhere)
    assert elsewhere.exists()


def test_a_home_without_jobs_is_no_error(store):
    remove_old_run_dirs(store)


# -- What of /dev/shm is a run's: what its processes have mapped, as long as it is the same file and nobody uses it


@pytest.fixture
def memory():
    """A folder in memory, as /dev/shm is: other filesystems may show another device in a process's maps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def segment(memory):
    """Makes a file of a given name in a stand-in for /dev/shm."""

    def make(name):
        path = memory / name
        path.write_bytes(b"\0" * mmap.PAGESIZE)
        return Segment(name, path.stat().st_ino)

    return make


def mapping(path):
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_what_a_process_has_mapped_is_seen_by_name_and_inode(memory, segment):
    mapped, other = segment("psm_1234"), segment("psm_5678")
    held = mapping(memory / mapped.name)
    again = Segment(mapped.name, mapped.inode + 1)
    assert node_dir.mapped_by([os.getpid()], [mapped, other, again], folder=memory) == {mapped}
    held.close()


def test_a_file_of_the_same_number_in_another_memory_is_another_file(memory, segment, monkeypatch):
    """A container's /dev/shm: its processes do not keep what a killed engine left in the node's."""
    left = segment("psm_1234")
    held = mapping(memory / left.name)
    assert node_dir.remove_segments([left], folder=memory) == []
    monkeypatch.setattr(node_dir, "_device_of", lambda folder: "0:0")
    assert node_dir.remove_segments([left], folder=memory) == [left]
    held.close()


def test_a_semaphore_that_was_mapped_before_it_got_its_name_is_seen():
    """As Python's, for processes that it spawns."""
    before = node_dir.list_segments()
    semaphore = multiprocessing.get_context("spawn").Lock()
    (made,) = node_dir.mapped_by([os.getpid()], node_dir.list_segments() - before)
    assert made.name.startswith("sem.mp-")
    del semaphore


def test_what_is_listed_is_of_known_kinds(memory, segment):
    kinds = ("psm_1234", "vllm_offload_x.mmap", "vllm_dist_0e-tp:0-[0-1]-cpushm_0", "sem.mp-abc", "nccl-x", "torch_1_2")
    known = {segment(name) for name in kinds}
    segment("sem.mine")
    (memory / "psm_folder").mkdir()
    (memory / "psm_link").symlink_to(memory / "psm_1234")
    assert node_dir.list_segments(folder=memory) == known


def test_what_nobody_maps_is_removed_and_what_somebody_maps_is_not(memory, segment):
    idle, used = segment("psm_idle"), segment("psm_used")
    held = mapping(memory / used.name)
    assert node_dir.remove_segments([idle, used], folder=memory) == [idle]
    assert os.listdir(memory) == [used.name]
    held.close()


def test_another_file_under_the_same_name_is_not_removed(memory, segment):
    now = segment("psm_1234")
    assert node_dir.remove_segments([Segment(now.name, now.inode + 1)], folder=memory) == []
    assert (memory / now.name).exists()


def test_a_name_that_leads_elsewhere_is_not_removed(memory):
    (memory / "shm").mkdir()
    victim = memory / "psm_victim"
    victim.write_text("x")
    assert node_dir.remove_segments([Segment("../psm_victim", victim.stat().st_ino)], folder=memory / "shm") == []
    assert victim.exists()


def test_another_users_segment_is_neither_listed_nor_removed(memory, segment):
    theirs = segment("psm_1234")
    give_away(memory / theirs.name)
    assert node_dir.list_segments(folder=memory) == set()
    assert node_dir.remove_segments([theirs], folder=memory) == []
