"""A launcher that was killed leaves nothing: its watcher clears up after it, and after both, the next run does.

Launchers are real processes here, with real children; /tmp and /dev/shm are the machine's own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from hpc_serve.job.cleanup import node_dir
from hpc_serve.job.cleanup.node_dir import Segment
from hpc_serve.job.cleanup.sweep import remove_abandoned
from hpc_serve.job.machine.process import RUN_MARK, marked_pids
from tests.cluster import wait_for

# A launcher whose engine shares memory, prints the segment's name, and may be deaf to SIGTERM.
LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from hpc_serve.job.cleanup.node_dir import DirOwner, private_node_dir
engine = '''
import signal, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN if len(sys.argv) > 1 else signal.SIG_DFL)
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
time.sleep(600)
'''
path, mark, run_dir, *deaf = Path(sys.argv[1]), *sys.argv[2:]
with private_node_dir(path, DirOwner(run_mark=mark, run_dir=run_dir)):
    environ = {**os.environ, "HPC_SERVE_RUN_MARK": mark}
    child = subprocess.Popen([sys.executable, "-c", engine, *deaf], env=environ, start_new_session=True)
    sys.stdin.read()
    child.kill()
    child.wait()
"""


def watchers(path):
    """The sweeping processes beside the launcher of `path`."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"hpc_serve.job.cleanup.sweep" in words and str(path).encode() in words:
                yield int(entry.name)


class Run:
    """A launcher in its folder, its engine, and what that shares."""

    def __init__(self, root: Path, *deaf: str) -> None:
        self.path = root / f"hs-{secrets.token_hex(4)}"
        self.mark = f"{self.path.name}-0"
        self.run_dir = root / "jobs" / "1-r0-0000abcd"
        self.run_dir.mkdir(parents=True)
        self.run_dir.chmod(0o700)
        argv = [sys.executable, "-c", LAUNCHER, str(self.path), self.mark, str(self.run_dir), *deaf]
        self.launcher = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.segment = Path("/dev/shm", self.launcher.stdout.readline().strip())

    def wait_for_notes(self) -> None:
        wait_for((self.path / "shared-memory-watcher").exists, 60, what="what the engine shares to be noted")

    def kill(self, *, watcher_too: bool) -> None:
        for pid in watchers(self.path) if watcher_too else ():
            os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()
        if watcher_too:  # a signal is sent before it has its effect
            wait_for(lambda: not list(watchers(self.path)), 60, what="the watcher's end")

    @property
    def left(self) -> list[object]:
        places = (self.path, self.run_dir, self.segment)
        return [*marked_pids(self.mark), *watchers(self.path), *(place for place in places if place.exists())]


@pytest.fixture
def run(tmp_path, request):
    tmp_path.chmod(0o1777)
    run = Run(tmp_path, *getattr(request, "param", ()))
    yield run
    run.kill(watcher_too=True)
    for pid in marked_pids(run.mark):  # one may end with another
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.segment.unlink(missing_ok=True)


@pytest.mark.parametrize("run", [["deaf"]], indirect=True)
def test_a_killed_launcher_leaves_no_process_no_folder_and_no_shared_memory(run):
    stranger = SharedMemory(create=True, size=4096)
    segment = Segment(stranger.name, os.stat(f"/dev/shm/{stranger.name}").st_ino)
    try:
        run.kill(watcher_too=False)
        wait_for(lambda: not run.left, 60, what="the watcher to clear up")
        assert segment in node_dir.list_segments()
    finally:
        stranger.close()
        stranger.unlink()


def test_what_is_left_when_all_was_killed_goes_with_the_next_run(run, monkeypatch):
    monkeypatch.setattr("hpc_serve.job.cleanup.sweep._GRACE_S", 60.0)
    run.wait_for_notes()
    run.kill(watcher_too=True)
    assert list(marked_pids(run.mark))
    assert run.segment.exists()
    assert remove_abandoned(run.path.parent) == [run.path]
    assert not run.left


def test_a_living_run_is_not_touched(run):
    run.wait_for_notes()  # by then all its processes are there
    before = sorted(map(str, run.left))
    assert remove_abandoned(run.path.parent) == []
    assert sorted(map(str, run.left)) == before


def test_a_watcher_does_not_end_by_the_signals_of_a_step_but_with_its_launcher(run):
    run.wait_for_notes()
    (watcher,) = watchers(run.path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(watcher, number)
    run.launcher.communicate("")
    wait_for(lambda: not list(marked_pids(run.mark)), 60, what="Python's own helper of the engine, which ends after it")
    assert not run.left


def test_a_folder_of_the_dead_stays_while_the_kernel_holds_a_process_of_theirs(tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)
    path, mark = tmp_path / "hs-0000000a", f"held-{os.getpid()}"
    os.close(node_dir.make(path, node_dir.DirOwner(run_mark=mark)))
    monkeypatch.setattr("hpc_serve.job.cleanup.sweep._GRACE_S", 0.1)
    monkeypatch.setattr("hpc_serve.job.cleanup.sweep._KILLED_S", 0.1)
    held = subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARK: mark})
    wait_for(lambda: list(marked_pids(mark)), 60, what="the process")
    with monkeypatch.context() as held_by_the_kernel:
        held_by_the_kernel.setattr(os, "kill", lambda *_: None)
        assert remove_abandoned(tmp_path) == []
    assert path.exists()
    held.kill()
    held.wait()
    assert remove_abandoned(tmp_path) == [path]
