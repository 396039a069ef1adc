"""A colleague asks a gateway of alice's from another account and another host, with what a shared folder holds.

Stub engines (tests/support/stub_engine.py): what is tested is who may ask, and with which files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import User
from tests.e2e.test_replicas import SMALL

pytestmark = [pytest.mark.slurm]

LAST_WORD = "is for others, too"
WITH_CURL = (
    """printf 'header = "Authorization: Bearer %s"' "$OPENAI_API_KEY" | curl --silent --show-error --config - """
)
WITH_SDK = """
import openai
client = openai.OpenAI()
asked = [{"role": "user", "content": "Why?"}]
print(client.chat.completions.create(model="8b", messages=asked).choices[0].message.content)
"""


@pytest.fixture
def alice(alice, alice_env, stub_env) -> User:
    user = User(alice.cluster, {**alice_env, **stub_env})
    user.hpc_serve_said("submit", "8b", *SMALL)
    user.hpc_serve_said("wait", "8b", "--timeout", "5m")
    return user


@pytest.fixture
def colleague(cluster, alice_env) -> User:
    return User(cluster, alice_env, name="mallory")


@contextmanager
def gateway(alice: User, *words: str) -> Iterator[str]:
    """Run a gateway on the login host; gives what it said."""
    argv = ["hpc-serve", "gateway", "8b", "--host", "login", "--port", "0", *words]
    program = alice.cluster.popen(argv, user="alice", env={**alice.environ, "PYTHONUNBUFFERED": "1"})
    said = ""
    try:
        for line in program.stdout:
            said += line
            if LAST_WORD in line:
                break
        yield said
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(120)


def ask(user: User, folder: Path, command: str) -> Any:
    """What a user's shell says on another host once it has sourced the file of a folder."""
    return user.run("bash", "-c", f"source {shlex.quote(str(folder / 'env.sh'))} && {command}", node="n2")


def test_a_colleague_asks_by_the_hosts_name_with_what_a_folder_holds(alice, colleague):
    folder = alice.cluster.shared / "of 8b"
    folder.mkdir()
    group = int(colleague.run("id", "-g").stdout)
    os.chown(folder, int(alice.run("id", "-u").stdout), group)
    folder.chmod(0o2750)
    with gateway(alice, "--share", str(folder)) as said:
        assert f"source {shlex.quote(str(folder / 'env.sh'))}" in said
        key = (folder / "api_key").read_text().strip()
        assert key not in said
        by_curl = ask(colleague, folder, WITH_CURL + '"$OPENAI_BASE_URL/models"')
        assert "8b" in [model["id"] for model in json.loads(by_curl.stdout)["data"]], by_curl.stderr
        by_number = WITH_CURL + '"${OPENAI_BASE_URL/login/10.77.0.10}/models"'
        assert json.loads(ask(colleague, folder, by_number).stdout)["data"]
        by_sdk = ask(colleague, folder, f"{sys.executable} -c {shlex.quote(WITH_SDK)}")
        assert "stub-" in by_sdk.stdout, by_sdk.stderr
        untrusting = ask(colleague, folder, f"unset CURL_CA_BUNDLE SSL_CERT_FILE; {WITH_CURL} $OPENAI_BASE_URL/models")
        assert "certificate" in untrusting.stderr


def test_without_a_folder_to_share_alice_alone_can_ask(alice, colleague):
    with gateway(alice) as said:
        folder = Path(re.search(r"source (\S+)/env.sh", said)[1])
        assert "you alone" in said
        assert json.loads(ask(alice, folder, WITH_CURL + '"$OPENAI_BASE_URL/models"').stdout)["data"]
        refused = ask(colleague, folder, "true")
        assert refused.returncode != 0
        assert "Permission denied" in refused.stderr
