"""`hpc-serve access`: its ssh line leads to a gateway, and what it says to paste is what the programs read."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster import wait_for
from tests.unit.gateway.conftest import GREEDY


@pytest.fixture
def said(ran):
    return lambda *words: ran(["access", *words]).out


def ssh_line(text: str) -> list[str]:
    return shlex.split(next(line for line in text.splitlines() if line.startswith("  ssh ")))


@pytest.mark.usefixtures("extra")
def test_without_a_gateway_the_line_starts_one_and_with_one_it_leads_there(service, said):
    service.start(*GREEDY)
    words = ssh_line(said("405b", "--login", "me@login1"))
    assert words[:2] == ["ssh", "-t"]
    assert words[-2] == "me@login1"
    socket = words[words.index("-L") + 1].partition(":")[2]
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    environ = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
    gateway = subprocess.Popen(["bash", "-c", f"exec {words[-1]}"], env=environ, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: "a gateway runs on" in said("405b"), 60, what="the gateway that the line starts")
        words = ssh_line(said("405b", "--local-port", "9001"))
        assert words[1] == "-N"
        assert f"9001:{socket}" in words
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(60)
    assert ssh_line(said("405b"))[1] == "-t"


def test_a_gateway_of_another_host_is_named(service, said):
    service.start(*GREEDY)
    folder = service.store.home / "gateway"
    folder.mkdir(mode=0o700)
    (folder / "login2.sock").touch()
    words = ssh_line(said("405b"))
    assert words[-1] == "login2"
    assert words[-2].endswith("/login2.sock")


@pytest.mark.parametrize(
    ("context", "words"),
    [("8192", "short for coding agents"), ("131072", "131,072 tokens is enough for coding agents")],
)
def test_the_context_is_held_against_what_agents_want(service, said, context, words):
    service.start("--max-model-len", context)
    assert words in said("405b")


def test_a_service_that_is_not_there_has_its_line_and_the_reason(service, said):
    text = said("none")
    assert ssh_line(text)
    assert "none" in text.splitlines()[-4]


def test_files_for_programs_are_read_as_meant(service, said):
    service.start("--max-model-len", "131072")
    opencode = json.loads(said("405b", "--for", "opencode").partition("\n")[2])
    provider = opencode["provider"]["hpc-serve"]
    assert provider["options"]["baseURL"] == "http://localhost:8000/v1"
    assert provider["models"] == {"405b": {"limit": {"context": 131072, "output": 32768}}}
    model = yaml.safe_load(said("405b", "--for", "continue"))["models"][0]
    assert (model["model"], model["apiBase"]) == ("405b", "http://localhost:8000/v1")
    listed = yaml.safe_load(said("405b", "--for", "litellm"))["model_list"]
    assert listed[0]["litellm_params"]["model"] == "hosted_vllm/405b"
    codex = said("405b", "--for", "codex", "--local-port", "9001")
    assert 'base_url = "http://localhost:9001/v1"' in codex
    if sys.version_info >= (3, 11):
        import tomllib

        assert tomllib.loads(codex)["model_providers"]["hpc-serve"]["wire_api"] == "responses"
    for program in ("claude-code", "open-webui"):
        named = dict(re.findall(r"(\w+)=(\S+)", said("405b", "--for", program)))
        assert "405b" in named.values() or named["OPENAI_API_BASE_URL"] == "http://localhost:8000/v1"


@pytest.mark.parametrize("program", ["curl", "python"])
def test_what_is_pasted_gets_an_answer(service, said, gateway, program):
    if program == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    service.start(*GREEDY)
    front = gateway()
    text = said("405b", "--for", program, "--local-port", str(front.port))
    argv = ["bash", "-c", text] if program == "curl" else [sys.executable, "-c", text]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"w0\.\w+ w1\..* w11\.", done.stdout)


@pytest.fixture
def login_host(tmp_path):
    """An sshd of this user on a loopback port; gives the words that lead ssh there."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd is installed (Debian: openssh-server)")
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (
        *(f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {keys / 'host'}", "UsePAM no", "StrictModes no"),
        *(f"AuthorizedKeysFile {keys / 'user.pub'}", "PasswordAuthentication no", "PermitRootLogin yes"),
        f"PidFile {keys / 'sshd.pid'}",
    )
    (keys / "sshd_config").write_text("\n".join(settings) + "\n")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([sshd, "-D", "-f", str(keys / "sshd_config")])
    asked = ("-F", "none", "-p", str(port), "-i", str(keys / "user"), "-o", "StrictHostKeyChecking=no")
    yield (*asked, "-o", f"UserKnownHostsFile={keys / 'known'}")
    daemon.terminate()
    daemon.wait(60)


@pytest.mark.usefixtures("extra")
def test_the_line_as_ssh_runs_it_starts_a_gateway_that_ends_with_it(service, said, login_host, tmp_path):
    service.start(*GREEDY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = said("405b", "--local-port", str(port), "--login", f"{pwd.getpwuid(os.getuid()).pw_name}@127.0.0.1")
    words = [*ssh_line(text)[:1], "-t", *login_host, *ssh_line(text)[1:]]  # twice: a test has no terminal
    with (tmp_path / "ssh.log").open("w") as log:
        ssh = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
    program = said("405b", "--for", "python", "--local-port", str(port))

    def answer():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        return done.stdout if "w11." in done.stdout else None

    try:
        wait_for(answer, 90, what="an answer through ssh", step_s=1.0)
        assert "a gateway runs on" in said("405b")
    finally:
        ssh.terminate()
        ssh.wait(60)
    wait_for(lambda: "starts a gateway" in said("405b"), 60, what="the end of the gateway")
