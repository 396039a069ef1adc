"""A browser on another host talks to a real, tiny model through `ssh -L` and the gateway's socket, across a handover.

HPC_SERVE_BROWSER names the Python with the browser (`make page-through-ssh` makes it); without it this is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.cluster.config import CHECKOUT
from tests.e2e.jobs import User
from tests.e2e.test_handover import jobs

BROWSER = os.environ.get("HPC_SERVE_BROWSER", "")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.engine,
    pytest.mark.skipif(not BROWSER, reason="HPC_SERVE_BROWSER is not set: `make page-through-ssh` sets it"),
]

SERVICE, LAPTOP = "8b", "n2"
TALK = CHECKOUT / "envs" / "browser" / "talk_on.py"
LONG_S = 900.0


@pytest.fixture
def alice(alice, tiny_models) -> User:
    return User(alice.cluster, {**alice.environ, "HPC_SERVE_MODEL": str(tiny_models / "8b")})


@pytest.fixture
def sshd(alice):
    """An sshd on the login host; gives the words that lead ssh there."""
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    assert program is not None, "no sshd is installed (Debian: openssh-server)"
    keys = alice.home / "keys"
    assert alice.run("mkdir", "-m", "700", str(keys)).returncode == 0
    for name in ("host", "user"):
        made = alice.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
        assert made.returncode == 0, made.stderr
    settings = (
        *("Port 2222", f"HostKey {keys / 'host'}", "UsePAM no", "StrictModes no", "PasswordAuthentication no"),
        *(f"AuthorizedKeysFile {keys / 'user.pub'}", f"PidFile {keys / 'sshd.pid'}"),
    )
    config = alice.write("keys/sshd_config", "\n".join(settings) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = alice.cluster.popen([program, "-D", "-f", str(config)], user="alice")
    asked = ("-F", "none", "-p", "2222", "-i", str(keys / "user"), "-o", "StrictHostKeyChecking=no")
    yield (*asked, "-o", f"UserKnownHostsFile={keys / 'known'}")
    daemon.send_signal(signal.SIGTERM)
    daemon.wait(60)


def test_a_browser_goes_on_across_a_handover(alice, sshd, show_table):
    kept = ("--time", "4", "--signal", "B:USR1@60", "--keep-up")
    submitted = json.loads(alice.hpc_serve_said("submit", SERVICE, *kept, "--json"))
    alice.hpc_serve_said("wait", SERVICE, "--timeout", "10m", timeout=LONG_S)
    socket = alice.home / "gateway.sock"
    stop = alice.home / "enough"
    quiet = {**alice.environ, "PYTHONUNBUFFERED": "1"}
    programs = [alice.cluster.popen(["hpc-serve", "gateway", "--socket", str(socket)], user="alice", env=quiet)]
    try:
        wait_for(socket.exists, 120, what="the gateway's socket")
        forward = ["ssh", *sshd, "-N", "-L", f"8000:{socket}", "alice@login"]
        programs.append(alice.cluster.popen(forward, user="alice", node=LAPTOP))
        wait_for(
            lambda: alice.run("curl", "-sf", "http://localhost:8000/health", node=LAPTOP).returncode == 0,
            120,
            what="the gateway through ssh",
        )
        argv = [BROWSER, str(TALK), "http://localhost:8000/", str(stop)]
        browser = alice.cluster.popen(argv, user="alice", node=LAPTOP, env=quiet)
        programs.append(browser)
        first = json.loads(browser.stdout.readline())
        assert first["answers"] == 1

        def took_over() -> bool:
            told = jobs(alice, SERVICE)
            is_over = told[submitted["job_id"]]["state"] in ("stopped", "failed")
            return is_over and any(one["state"] == "ready" for one in told.values())

        wait_for(took_over, LONG_S, what="the handover", step_s=2.0)
        answers = json.loads(browser.stdout.readline())
        wait_for(lambda: browser.poll() is None, 1, what="the browser")
        stop.touch()
        lines = browser.stdout.read().splitlines()
        assert browser.wait(300) == 0, lines
        told = [json.loads(line) for line in lines if line.startswith("{")]
        show_table(f"{told[-1]['answers']} answers in the browser, across {len(jobs(alice, SERVICE)) - 1} handovers")
        assert told[-1]["answers"] >= answers["answers"] + 2
    finally:
        for program in reversed(programs):
            program.send_signal(signal.SIGTERM)
            program.wait(120)
        alice.hpc_serve("stop", SERVICE, "--now")
