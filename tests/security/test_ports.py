"""A stranger on a job's own nodes takes its ports while it starts: he stops no start.

The stub stands for vLLM: it binds a port of its own with SO_REUSEADDR, and listens once it has loaded. The same against
a real engine is in test_real_engines.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.e2e.jobs import Record, User, stub_script

pytestmark = [pytest.mark.slurm]

STRANGER = Path(__file__).with_name("stranger.py")
Told = dict[str, Any]


@pytest.fixture(scope="module")
def alice(cluster, alice_env):
    return User(cluster, alice_env)


@pytest.fixture(scope="module")
def mallory(cluster, alice_env):
    return User(cluster, alice_env, name="mallory")


@contextmanager
def at_work(mallory: User, what: str, *, node: str) -> Iterator[Told]:
    """The stranger does this on a node meanwhile; afterwards the value holds what he tells."""
    enough, told = mallory.home / f"enough-{what}", Told()
    enough.unlink(missing_ok=True)
    words: list[str | Path] = [sys.executable, STRANGER, what, enough]
    process = mallory.cluster.popen(words, user=mallory.name, node=node, env=mallory.environ)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"began": True}
        yield told
        enough.touch()
        told.update(json.loads(process.communicate(timeout=300)[0]))
    finally:
        process.kill()
        process.wait()


def started(alice: User, script: str, nodes: str) -> tuple[Record, str]:
    """The record of a job that is ready, and what its script has said. The job is cancelled."""
    job_id = alice.sbatch(alice.write("attacked.sh", script), f"--nodelist={nodes}")
    try:
        record = alice.wait_until_ready("attacked", job_id, 300)
    finally:
        alice.cancel(job_id)
        wait_for(lambda: not alice.is_queued(job_id), 180, what="the end of it")
    return record, (alice.home / f"hpc-serve-attacked-{job_id}.log").read_text()


@pytest.mark.parametrize("options", [(), ("--port", "23456")], ids=["a port of the kernel's choice", "--port"])
def test_a_stranger_who_listens_beside_silent_ports_stops_no_start(alice, mallory, options):
    with at_work(mallory, "listen_beside_silent_ports", node="n1") as told:
        record, log = started(alice, stub_script("attacked", "--stub-load-s", "10", *options), "n1")
    assert told["taken"], "the stub's own port, which nobody is told of"
    assert record["port"] not in told["taken"]
    assert not options or record["port"] == 23456
    assert "attempt" not in log, log


def test_a_stranger_who_takes_the_range_after_each_prepare_stops_no_start(alice, mallory):
    text = stub_script("attacked", num_nodes=2, tensor_parallel_size=2, pipeline_parallel_size=2, backend="mp")
    with at_work(mallory, "take_the_range_after_prepare", node="n1") as told:
        _, log = started(alice, text, "n1,n2")
    assert told["times"] == 1
    assert "attempt" not in log, log
