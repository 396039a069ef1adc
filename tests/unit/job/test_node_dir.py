"""Whose a node-local folder is, and who may remove it: only what a dead launcher of this user left on this node."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat

import pytest

from hpc_serve.errors import InvalidRequestError
from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import DirOwner, Segment
from hpc_serve.job.machine.network import PortsInUseError
from tests.support.refusals import refuse
from tests.support.strangers import give_away

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
