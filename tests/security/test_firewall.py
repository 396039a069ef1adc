"""A firewall that a site sets for a job closes the ports that vLLM's processes choose, and the service works as before.

docs/understand/security.md has the rules. A listener of the owner's stands for vLLM's inner ports: the stub has none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.cluster import SlurmCluster, wait_for
from tests.e2e.jobs import User

IPTABLES = shutil.which("iptables")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(IPTABLES is None, reason="there is no iptables (apt-get install iptables)"),
]

NODES, PORT = ("n1", "n2"), "23456"
LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        listener.accept()[0].close()
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def alice(cluster, alice_env, stub_env) -> Iterator[User]:
    user = User(cluster, {**alice_env, **stub_env})
    yield user
    user.run("scancel", "--user", "alice")
    wait_for(lambda: not user.processes(), 180, what="the end of all jobs")


@pytest.fixture(scope="module")
def mallory(cluster, alice_env) -> User:
    return User(cluster, alice_env, name="mallory")


@contextmanager
def firewall(cluster: SlurmCluster) -> Iterator[None]:
    """The rules of a site's prolog on each node of a job, and of its epilog afterwards."""
    addresses = ",".join(cluster.config.address(node) for node in NODES)
    closed = ("-p", "tcp", "--syn", "--dport", "32768:65535")
    rules = (("!", "-i", "lo", *closed, "-j", "REJECT"), ("-s", addresses, *closed, "-j", "ACCEPT"))

    def change(how: str, node: str, rule: tuple[str, ...]) -> None:
        done = cluster.run([str(IPTABLES), how, "INPUT", *rule], user="root", node=node, env=dict(os.environ))
        assert done.returncode == 0, done.stderr

    with ExitStack() as undo:
        for node in NODES:
            for rule in rules:  # the last one comes first
                change("-I", node, rule)
                undo.callback(change, "-D", node, rule)
        yield


@contextmanager
def inner_port(alice: User) -> Iterator[str]:
    """A port that the kernel chose, of a process of the owner's on the first node, at all addresses."""
    program = alice.cluster.popen([sys.executable, "-c", LISTEN], user="alice", node="n1", env=dict(alice.environ))
    try:
        assert program.stdout is not None
        yield program.stdout.readline().strip()
    finally:
        program.kill()
        program.wait()


def connects(user: User, port: str, node: str) -> str:
    return user.run(sys.executable, "-c", CONNECT, user.cluster.config.address("n1"), port, node=node).stdout.strip()


def test_strangers_reach_the_engines_port_alone(alice, mallory):
    words = ("--nodes", "2", "--nodelist", "n1,n2", "--backend", "mp", "--tensor-parallel-size", "2")
    layout = ("--pipeline-parallel-size", "2", "--no-exclusive", "--mem", "2G", "--cpus-per-task", "2")
    with inner_port(alice) as port:
        assert connects(mallory, port, "n3") == "connected"
        with firewall(alice.cluster):
            alice.hpc_serve_said("submit", "8b", *words, *layout, "--", "--port", PORT)
            alice.hpc_serve_said("wait", "8b", "--timeout", "5m")  # the nodes reach each other
            assert connects(mallory, port, "n3") == connects(mallory, port, "login") == "ConnectionRefusedError"
            assert connects(alice, port, "n2") == "connected"
            assert connects(mallory, PORT, "n3") == "connected"  # it asks for the key
            assert "stub-" in alice.hpc_serve_said("chat", "8b", "Why?")
            assert "reach" not in alice.hpc_serve_said("doctor", "8b").lower()
        assert connects(mallory, port, "n3") == "connected"
