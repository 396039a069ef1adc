"""`make test`: python -m tests [WORDS OF PYTEST ...]

Runs pytest. A few tests that fail are run again, alone, on a machine that is quiet by then. A test that passes then is
listed as unsteady; a test that fails twice fails the run. However pytest ends, no cluster of its processes stays up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.cluster.leftovers import remove_leftovers
from tests.support.children import children_of

MAX_AGAIN = 8  # more failures than this are a fault, not chance


def main(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="hpc-serve-tests-") as folder:
            return _run(words, Path(folder))
    finally:
        if os.geteuid() == 0:
            _remove_clusters()


def _run(words: list[str], cache: Path) -> int:
    code = _pytest([*words, "-o", f"cache_dir={cache}"])
    failed = _failed(cache)
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MAX_AGAIN:
        return code
    print(f"\n{len(failed)} failed; run again, alone:", flush=True)
    alone = [word for word in words if word == "--require-cluster"]
    code = _pytest([*alone, "-o", f"cache_dir={cache / 'again'}", *failed])
    twice = _failed(cache / "again")
    for name in failed:
        print(f"FAILED TWICE {name}" if name in twice or code > 1 else f"UNSTEADY {name}: failed, then passed alone")
    return code


def _pytest(words: list[str]) -> int:
    """Return pytest's exit code. A Ctrl-C reaches pytest too, which then ends by itself."""
    with subprocess.Popen([sys.executable, "-m", "pytest", *words]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
            except SystemExit:
                _terminate(process.pid)
                raise


def _terminate(pid: int) -> None:
    """End pytest and its workers. A worker that goes on would keep its cluster."""
    workers = children_of(pid)
    for each in (*workers, pid):
        os.kill(each, signal.SIGTERM)
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 30, what="the workers' end")


def _failed(cache: Path) -> list[str]:
    """Return the ids of the tests that failed, as pytest's own cache lists them."""
    found = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(found.read_text())) if found.exists() else []


def _remove_clusters() -> None:
    for name in remove_leftovers():
        print(f"took down the cluster {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
