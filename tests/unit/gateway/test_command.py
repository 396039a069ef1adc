"""`hpc-serve gateway` as a program: where it listens, who reaches that, several side by side, and its end."""

from __future__ import annotations

import grp
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path

import openai
import pytest

from hpc_serve.client.replicas.sdk import http
from hpc_serve.gateway import listening
from tests.cluster import wait_for
from tests.unit.gateway.conftest import ANSWER, ASKED

SHARE = ("--port", "0", "--host", "0.0.0.0", "--share", "{}")


def mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def sdk(path) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(transport=http.HTTPTransport(uds=str(path)), trust_env=False)
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0, timeout=120)


def ask(path) -> str:
    return sdk(path).completions.create(**ASKED).choices[0].text


def socket_of(service):
    return service.store.home / "gateway" / f"{socket.gethostname().partition('.')[0]}.sock"


def test_it_listens_on_a_socket_that_its_user_alone_reaches(service, engine, program):
    one = program().started()
    path = socket_of(service)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert f"curl --unix-socket {path} http://localhost/v1/models" in one.said
    assert ask(path) == ANSWER
    second = program()
    assert second.ended() == 2
    assert "another gateway listens on" in second.said
    assert ask(path) == ANSWER
    assert one.ended_by(signal.SIGTERM) == 0
    assert not path.exists()
    assert "Traceback" not in one.said


def test_readmes_curl_is_answered(service, engine, program):
    program().started()
    page = (Path(__file__).parents[3] / "docs" / "guides" / "one-address.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^curl --unix-socket \S+( .*?}')$", page, re.MULTILINE | re.DOTALL)
    told = f"curl --silent --unix-socket {socket_of(service)}" + command.replace('"70b"', '"405b"')
    done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_two_side_by_side_and_one_is_killed(service, engine, program):
    first, second = service.store.home / "gateway" / "a.sock", service.store.home / "gateway" / "b.sock"
    one = program("--socket", str(first)).started()
    program("--socket", str(second), "405b").started()
    assert ask(first) == ask(second) == ANSWER
    one.process.kill()
    one.ended()
    assert first.exists()  # nobody listens on it
    with pytest.raises(openai.APIConnectionError):
        ask(first)
    assert ask(second) == ANSWER
    program("--socket", str(first)).started()
    assert ask(first) == ANSWER


def test_a_home_whose_path_is_too_long_gets_a_socket_on_this_node(tmp_path):
    home = tmp_path / ("long" * 30)
    with tempfile.TemporaryDirectory(dir="/tmp") as local:  # the folder of a test may itself be too long
        environ = {"HPC_SERVE_TMPDIR": local}
        path = listening.default_socket(home, environ)
        with listening.on_socket(path):
            assert path.parents[1] == Path(local)
            assert (mode(path), mode(path.parent)) == (0o600, 0o700)
        assert not path.exists()
        assert listening.default_socket(home, environ) == path
        path.parent.chmod(0o777)  # as one that another user made first
        other = listening.default_socket(home, environ)
        assert other.parent != path.parent
        assert mode(other.parent) == 0o700


def test_a_port_has_a_key_that_nobody_else_reads(service, engine, program, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it would read the key
    monkeypatch.setenv("no_proxy", "mirror")
    one = program("--port", "0").started()
    key_file = service.store.home / "gateway" / "api_key"
    key = key_file.read_text().strip()
    assert mode(key_file) == 0o600
    assert len(key) >= 32
    assert key not in one.said
    assert key.encode() not in Path(f"/proc/{one.process.pid}/cmdline").read_bytes()
    wait_for(lambda: "in the clear" in one.said, 60, what="the warning, which is its last word")
    base_url = f"http://127.0.0.1:{one.port}/v1"
    assert f"OPENAI_BASE_URL={base_url}\n" in one.said
    assert "export no_proxy=mirror,127.0.0.1\nexport NO_PROXY=mirror,127.0.0.1\n" in one.said
    monkeypatch.setenv("no_proxy", "mirror,127.0.0.1")
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    assert client.completions.create(**ASKED).choices[0].text == ANSWER
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=base_url, api_key="x" * 43, max_retries=0).models.list()


def variables_of(folder: Path) -> dict[str, str]:
    """What a shell has in its environment once it has sourced the file of a folder."""
    script = f"source {shlex.quote(str(folder / 'env.sh'))} && env -0"
    done = subprocess.run(["bash", "-euc", script], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if "=" in line)


def models_by(variables: dict[str, str], name: str) -> list[str]:
    """The models of a gateway on this host, asked by that name or address, as OpenSSL and Python verify it."""
    context = ssl.create_default_context(cafile=variables["SSL_CERT_FILE"])
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    port = int(variables["OPENAI_BASE_URL"].rpartition(":")[2].partition("/")[0])
    connection = HTTPSConnection(name, port, context=context, timeout=60)
    with closing(context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=name)) as spoken:
        connection.sock = spoken
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {variables['OPENAI_API_KEY']}"})
        return [model["id"] for model in json.loads(connection.getresponse().read())["data"]]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_address_that_others_reach_speaks_tls_by_name_and_number(service, engine, program, workers):
    one = program("--port", "0", "--host", "0.0.0.0", "--workers", workers).started()
    wait_for(lambda: "Readers of this folder" in one.said, 60, what="its last word")
    folder = Path(re.search(r"source (\S+)/env.sh", one.said)[1])
    assert folder.parent == service.store.home / "gateway"
    assert "Readers of this folder have the key: you alone" in one.said
    variables = variables_of(folder)
    assert variables["OPENAI_BASE_URL"].startswith(f"https://{os.uname().nodename}:")
    assert variables["OPENAI_API_KEY"] not in one.said
    for name in (os.uname().nodename, socket.gethostname().partition(".")[0], "localhost", "127.0.0.1"):
        assert "405b" in models_by(variables, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        models_by(variables, "elsewhere.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        models_by({**variables, "SSL_CERT_FILE": str(service.store.home / "authority" / "authority.pem")}, "localhost")
    assert one.ended_by(signal.SIGTERM) == 0
    assert not folder.exists()


def test_a_shared_folder_is_read_by_its_group_and_works_as_a_copy(engine, program, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o2750)
    one = program("--port", "0", "--host", "0.0.0.0", "--share", str(folder)).started()
    group = grp.getgrgid(folder.stat().st_gid).gr_name
    wait_for(lambda: "Readers of this folder" in one.said, 60, what="its last word")
    assert f"you, group {group} and whom an ACL names" in one.said
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys(
        ("api_key", "certificate.pem", "env.sh", "trusted.pem"), 0o640
    )
    assert "PRIVATE KEY" not in "".join(path.read_text() for path in folder.iterdir())
    copy = tmp_path / "a copy's folder"
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    variables = variables_of(copy)
    assert variables["SSL_CERT_FILE"] == variables["CURL_CA_BUNDLE"] == str(copy / "trusted.pem")
    assert variables["NODE_EXTRA_CA_CERTS"] == str(copy / "certificate.pem")
    assert "405b" in models_by(variables, os.uname().nodename)
    line = next(line for line in one.said.splitlines() if "curl" in line)
    assert "header" in line
    assert "-H" not in line


def test_copies_stay_good_across_restarts(engine, program, tmp_path):
    folders = [tmp_path / "shared0", tmp_path / "shared1"]
    for folder in folders:
        one = program("--port", "0", "--host", "0.0.0.0", "--share", str(folder)).started()
        assert one.ended_by(signal.SIGTERM) == 0
    first, second = ((folder / "certificate.pem").read_text() for folder in folders)
    assert first == second
    assert (mode(folders[0]), mode(folders[0] / "api_key")) == (0o700, 0o600)


@pytest.mark.parametrize(
    ("open_to", "words", "said"),
    [
        (0o755, ("--socket", "{}/g.sock"), "can be read by others"),
        (0o755, SHARE, "who reads it has the key"),
        (0o777, SHARE, "can be changed"),
        (0o701, SHARE, "open to everybody"),
    ],
)
def test_a_folder_that_others_read_or_change_is_not_used(refused, tmp_path, open_to, words, said):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(open_to)
    assert said in refused(*(word.format(folder) for word in words))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "permissions", "option", "code", "said"),
    [
        ("k" * 32, 0o644, ("--port", "0", "--key-file"), 5, "can be read by others"),
        ("notes", 0o600, ("--socket",), 2, "it is no socket"),
    ],
)
def test_a_file_that_is_not_for_the_gateway_is_refused_and_stays(
    refused, tmp_path, text, permissions, option, code, said
):
    file = tmp_path / "own" / "file"
    file.parent.mkdir(mode=0o700)
    file.write_text(text)
    file.chmod(permissions)
    told = refused(*option, str(file), code=code)
    assert said in told
    assert text not in told
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--socket", "/x/y", "--port", "0"), "are two gateways"),
        (("--host", "0.0.0.0"), "--host needs --port"),
        (("no/name",), "no/name"),
        (("--share", "/x"), "--share needs --host"),
        (("--share", "/x", "--port", "0"), "--share needs --host"),
        (("--share", "/x", "--port", "0", "--host", "127.0.0.1"), "--share needs an address that others reach"),
        (("--max-in-flight", "1", "--workers", "2"), "--max-in-flight is shared out among --workers: give at least"),
        (("--queue", "1", "--workers", "2"), "--queue is shared out among --workers: give at least one request to"),
        (("--workers", "2", "--on-demand", "/x"), "--on-demand starts and ends models in one process"),
    ],
)
def test_what_cannot_be_asked_for(refused, words, said):
    assert said in " ".join(refused(*words).split())


def test_at_sigterm_it_finishes_what_is_under_way_and_takes_no_more(service, hanging, program):
    hang = hanging("--stub-hang-after", "1")
    one = program("--grace", "5m").started()
    path = socket_of(service)
    stream = sdk(path).completions.create(**ASKED, stream=True)
    chunks = [next(stream)]
    one.process.send_signal(signal.SIGTERM)

    def takes_no_more() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) != 0

    wait_for(takes_no_more, 60, what="the end of the listener")
    assert one.process.poll() is None
    hang.unlink()
    chunks += list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ANSWER
    assert one.ended() == 0


def test_at_sigterm_what_takes_longer_than_the_grace_is_cut(service, hanging, program):
    hanging("--stub-hang-after", "1")
    one = program("--grace", "1s").started()
    stream = sdk(socket_of(service)).completions.create(**ASKED, stream=True)
    next(stream)
    assert one.ended_by(signal.SIGTERM) == 0
    with pytest.raises((openai.APIError, http.HTTPError)):
        list(stream)


def test_without_the_extra_it_says_what_to_install(service, tmp_path):
    code = "import sys; sys.modules['httptools'] = None\nfrom hpc_serve.cli.main import main; main(['gateway'])"
    environ = {**os.environ, "HPC_SERVE_HOME": str(service.store.home)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'hpc-serve[gateway]'" in done.stderr


def test_without_a_folder_for_counts_no_worker_is_started(refused, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    told = refused("--workers", "2", code=1)
    assert "--workers needs a folder for counts: " in told
    assert "Set TMPDIR to a folder that you may write to." in told
