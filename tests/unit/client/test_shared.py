"""A member of a group asks a service that is shared with it, by every program of ours, and a stranger cannot.

Stub engines. Member and stranger are real users, which only root can be in turn.
"""

from __future__ import annotations

import grp
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_serve.rendezvous import shares
from tests.support.as_user import run_as
from tests.support.stubs import StubService

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")

GROUP, MEMBER, STRANGER = "games", 64_002, 64_003
ANSWER = "stub-"
SDK = """
import asyncio, sys
from hpc_serve import connect, connect_async
asked = {"messages": [{"role": "user", "content": "Why?"}], "temperature": 0}
client = connect(sys.argv[1])
print(client.chat.completions.create(model=client.model, **asked).choices[0].message.content)
async def ask():
    async with await connect_async(sys.argv[1]) as client:
        answer = await client.chat.completions.create(model=client.model, **asked)
        print(answer.choices[0].message.content)
asyncio.run(ask())
"""
GATEWAY = """
import http.client, json, os, socket, subprocess, sys, time
path = sys.argv[1] + "/gateway.sock"
gateway = subprocess.Popen([sys.executable, "-m", "hpc_serve.cli", "gateway", sys.argv[2], "--socket", path])
try:
    while not os.path.exists(path):
        assert gateway.poll() is None
        time.sleep(0.05)
    one = socket.socket(socket.AF_UNIX)
    one.connect(path)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = one
    body = {"model": "405b", "prompt": "Why?", "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    print(json.loads(connection.getresponse().read())["choices"][0]["text"])
finally:
    gateway.terminate()
    gateway.wait()
"""


@pytest.fixture
def service(open_folder) -> Iterator[StubService]:
    service = StubService(open_folder / "home")
    service.start()
    StubService(open_folder / "home", "8b")
    yield service
    service.close()


def run(user: int, open_folder: Path, *argv: str, groups: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    home = open_folder / f"of-{user}"
    if not home.exists():
        home.mkdir(mode=0o700)
        os.chown(home, user, user)
    return run_as(user, home, *argv, groups=groups)


def test_the_group_asks_by_every_program_and_nobody_else_does(service, open_folder):
    shares.share(service.store, "405b", grp.getgrnam(GROUP).gr_gid)
    named = str(service.store.service_dir("405b"))
    key = service.key_file.read_text().strip()
    ways = {
        "sdk": ("-c", SDK, named),
        "chat": ("-m", "hpc_serve.cli", "chat", named, "Why?", "--temperature", "0"),
        "gateway": ("-c", GATEWAY, str(open_folder / f"of-{MEMBER}"), named),
    }
    for way, argv in ways.items():
        done = run(MEMBER, open_folder, *argv, groups=(GROUP,))
        assert ANSWER in done.stdout, (way, done.stderr)
        assert key not in done.stdout + done.stderr
    for way in ("sdk", "chat"):
        done = run(STRANGER, open_folder, *ways[way])
        assert done.returncode != 0
        assert "Permission denied" in done.stderr
        done = run(
            MEMBER,
            open_folder,
            *ways[way][:-1] if way == "sdk" else ways[way][:3],
            str(open_folder / "home/services/8b"),
        )
        assert ANSWER not in done.stdout


def test_the_group_sees_how_the_service_is_and_changes_nothing(service, open_folder):
    shares.share(service.store, "405b", grp.getgrnam(GROUP).gr_gid)
    named = str(service.store.service_dir("405b"))

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return run(MEMBER, open_folder, "-m", "hpc_serve.cli", *words, groups=(GROUP,))

    shown = said("status", named, "--json")
    assert shown.returncode == 0, shown.stderr
    (replica,) = json.loads(shown.stdout)["services"]
    assert (replica["service"], replica["state"]) == ("405b", "ready")
    words: tuple[str, ...]
    for words in (("stop", named), ("scale", named, "2"), ("wake", named), ("logs", named), ("forget", named)):
        done = said(*words)
        assert done.returncode == 2, words
        assert "of a service that another user shares" in done.stderr, done.stderr
    again: tuple[tuple[str, ...], ...] = (
        ("gateway", named, "--share", "/tmp/x", "--host", "0.0.0.0", "--port", "0"),
        ("env", named),
    )
    for words in again:
        done = said(*words)
        assert done.returncode == 2, words
        assert "another user" in done.stderr, done.stderr
    assert service.store.read("405b").records[0].state == "ready"
