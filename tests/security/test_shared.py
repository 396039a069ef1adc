"""The cluster's second user, a group that a service is shared with, and keys of persons.

Stub engines (tests/support/stub_engine.py): what is tested is who may ask, and what they see. Tests in
tests/unit/rendezvous/test_shares.py have a third user, who is in no group.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.cluster.config import PROJECT
from tests.e2e.jobs import User
from tests.e2e.test_replicas import SMALL

pytestmark = [pytest.mark.slurm]

ASK_EVERY_WAY = Path(__file__).with_name("ask_every_way.py")
BODY = json.dumps({"model": "team", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4})
CURL = (
    """printf '%s' "${KEY:+header = \\"Authorization: Bearer $KEY\\"}" | """
    'curl --config - --silent --show-error --max-time 100 --output /dev/null --write-out "%{http_code}" '
    '${ORIGIN:+-H "Origin: $ORIGIN"} ${NAMED:+-H "Host: $NAMED"} '
    '-H "Content-Type: application/json" "$OPENAI_BASE_URL/chat/completions" --data "$BODY"'
)


@pytest.fixture(scope="module")
def mallory(cluster, alice_env) -> User:
    return User(cluster, alice_env, name="mallory")


@pytest.fixture(scope="module")
def alice(cluster, alice_env, stub_env) -> Iterator[User]:
    """Alice with two services: `team` is shared with the group, `own` is not."""
    user = User(cluster, {**alice_env, **stub_env})
    user.home.chmod(0o711)
    for words in (("--name", "own"), ("--name", "team", "--share", PROJECT)):
        user.hpc_serve_said("submit", "8b", *words, *SMALL)
    for service in ("own", "team"):
        user.hpc_serve_said("wait", service, "--timeout", "5m")
    try:
        yield user
    finally:
        user.run("scancel", "--user", "alice")
        wait_for(lambda: not user.processes(), 180, what="the end of all jobs")
        user.home.chmod(0o700)


def path_of(alice: User, service: str) -> str:
    return str(alice.home / ".hpc-serve" / "services" / service)


def asks(user: User, way: str, service: str, node: str = "n2") -> str:
    done = user.run(sys.executable, str(ASK_EVERY_WAY), way, service, "Why?", node=node)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["sync", "async", "chat"])
def test_with_a_share_he_asks_that_service_and_without_one_nothing(alice, mallory, way):
    assert asks(mallory, way, path_of(alice, "team")) == "answered\n"
    assert "Permission denied" in asks(mallory, way, path_of(alice, "own"))


def test_he_sees_the_records_of_that_service_and_nothing_else(alice, mallory):
    home = alice.home / ".hpc-serve"
    found = mallory.run("find", str(home), "-readable", "-print", node="n2").stdout.split()
    assert found == []  # the folders above show no names
    found = mallory.run("find", path_of(alice, "team"), "-readable", "-print", node="n2").stdout.split()
    (record,) = [Path(path).name for path in found if path.endswith(".json")]
    assert sorted(Path(path).name for path in found) == sorted(["api_key", record, "team"])
    shown = json.loads(mallory.hpc_serve_said("status", path_of(alice, "team"), "--json"))["services"]
    assert [(one["service"], one["state"]) for one in shown] == [("team", "ready")]


def test_stop_and_logs_stay_the_owners(alice, mallory):
    team = path_of(alice, "team")
    (job_id,) = {one["job_id"] for one in json.loads(alice.hpc_serve_said("status", "team", "--json"))["services"]}
    for words in (("stop", team, "--now"), ("logs", team), ("scale", team, "2"), ("wake", team)):
        assert mallory.hpc_serve(*words).returncode != 0, words
    for words in (("stop", "team", "--now"), ("logs", "team"), ("scale", "team", "2")):
        home = {"HPC_SERVE_HOME": str(alice.home / ".hpc-serve")}
        assert mallory.hpc_serve(*words, env=home).returncode != 0, words
    assert "denied" in mallory.run("scancel", job_id).stderr
    assert mallory.run("cat", f"{team}/logs/{job_id}.log").stdout == ""
    assert alice.is_queued(job_id)
    assert asks(alice, "chat", "team") == "answered\n"


def test_a_further_job_keeps_to_the_share(alice, mallory):
    alice.hpc_serve_said("scale", "team", "2")
    alice.hpc_serve_said("wait", "team", "--replicas", "2", "--timeout", "5m")

    def is_seen() -> bool:
        said = mallory.hpc_serve_said("status", path_of(alice, "team"), "--json")
        return [one["state"] for one in json.loads(said)["services"]] == ["ready", "ready"]

    wait_for(is_seen, 60, what="both replicas")
    assert asks(mallory, "sync", path_of(alice, "team")) == "answered\n"


@pytest.fixture(scope="module")
def folder(alice, mallory) -> Iterator[Path]:
    """What readers of a gateway's folder have; the gateway is on the login host, at an address of its network."""
    folder = alice.cluster.shared / "of team"
    folder.mkdir()
    owner, group = (int(user.run("id", "-u").stdout) for user in (alice, mallory))
    os.chown(folder, owner, group)
    folder.chmod(0o2750)
    argv = ["hpc-serve", "gateway", "team", "--host", "login", "--port", "0", "--share", str(folder), "--own-keys"]
    program = alice.cluster.popen(argv, user="alice", env={**alice.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert program.stdout is not None
        assert next(line for line in program.stdout if "each needs a key of their own" in line)
        yield folder
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(120)


@pytest.fixture(scope="module")
def key(alice) -> str:
    return alice.hpc_serve("key", "add", "mallory").stdout.strip()


class TestPersonalKeys:
    def asked(self, mallory: User, folder: Path, **variables: str) -> str:
        command = f"source {shlex.quote(str(folder / 'env.sh'))} && {CURL}"
        done = mallory.run("bash", "-c", command, env={"BODY": BODY, **variables}, node="n2")
        return done.stdout or done.stderr

    def test_three_requests_and_pages(self, mallory, folder, key):
        wait_for(lambda: self.asked(mallory, folder, KEY=key) == "200", 10, what="the new key")
        assert self.asked(mallory, folder) == "401"
        assert self.asked(mallory, folder, KEY=f"{key[:-1]}_") == "401"
        for origin in ("http://evil.example", "null"):
            assert self.asked(mallory, folder, KEY=key, ORIGIN=origin) == "403"
            assert self.asked(mallory, folder, ORIGIN=origin) == "403"
        assert self.asked(mallory, folder, NAMED="evil.example") == "401"  # TLS: the name is not in the certificate

    def test_what_he_used_is_counted(self, alice, mallory, folder, key):
        def used() -> dict[str, object]:
            (shown,) = json.loads(alice.hpc_serve_said("key", "list", "--json"))
            return shown

        wait_for(lambda: used()["requests"], 60, what="a request")
        assert used()["completion_tokens"]

    def test_a_revoked_key_is_refused_within_five_seconds(self, alice, mallory, folder, key):
        assert self.asked(mallory, folder, KEY=key) == "200"
        alice.hpc_serve_said("key", "revoke", "mallory")
        began_s = time.monotonic()
        wait_for(lambda: self.asked(mallory, folder, KEY=key) == "401", 5, what="the end of the key")
        assert time.monotonic() - began_s < 10
