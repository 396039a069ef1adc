"""Whatever stands in a file or comes over a connection: an error of ours or an answer, no traceback, and no end.

The inputs are right ones with faults by chance. Each test runs with a fixed seed and with one made from the day's date.
A failure prints its seed, and HPC_SERVE_FUZZ_SEED runs that seed alone. HPC_SERVE_FUZZ_CASES is the number of inputs.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest

from hpc_serve.cli.main import run
from hpc_serve.errors import HpcServeError
from hpc_serve.gate import connection_limits
from hpc_serve.gate.gate import Gate
from hpc_serve.hub.hub import find_model
from hpc_serve.job.links.control import ControlServer, connect
from hpc_serve.job.links.link import make_ticket
from hpc_serve.job.machine.network import choose_port, listen_on
from hpc_serve.plan import model_from_config
from hpc_serve.rendezvous.fields import from_json_text, to_json_text
from hpc_serve.rendezvous.record import EndpointRecord, JobEnd, SubmittedJob
from hpc_serve.vllm.arguments import read_args_file
from hpc_serve.vllm.command import check_file_arguments
from tests.support.asgi_server import served
from tests.support.nodes import make_node, make_worker
from tests.support.sites import load_site
from tests.support.stubs import make_record, make_submitted

SEEDS = {"fixed seed": 20_261_122, "seed of the day": int(datetime.now(timezone.utc).strftime("%Y%m%d"))}
if asked := os.environ.get("HPC_SERVE_FUZZ_SEED"):
    SEEDS = {"asked seed": int(asked)}
CASES = int(os.environ.get("HPC_SERVE_FUZZ_CASES") or 200)
KEY = "k-0123456789abcdef"
NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**400,
        1e308,
        -0.0,
        float("nan"),
        float("inf"),
        "",
        " ",
        "0",
        "a" * 9000,
    ),
    *(
        "\n",
        "\r\n",
        "\x00",
        "\x1b[2J\x1b]0;x\x07",
        "\u202e",
        "\ud800",
        "\U0001f600",
        "../../etc/passwd",
        "/",
        "-x",
        "--",
    ),
    *("$(id)", "`id`", "'", '"', "{{ 7*7 }}", "%s", [], {}, [[[]]], [None], {"": None}, {"a": {"a": {}}}),
)
NASTY_BYTES = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xc3",
        b"\r",
        b"\n",
        b"\r\n",
        b"\x1b[2J",
        b"{",
        b"}",
        b"[" * 3000,
        b'"',
        b"\\",
        b":",
        b",",
    ),
    *(
        b" ",
        b"\t",
        b"#",
        b"&a",
        b"*a",
        b"!!python/object:os.system",
        b"9" * 5000,
        b"NaN",
        b"\\ud800",
        b"-",
        b"--",
        b"%",
    ),
)


@pytest.fixture(params=tuple(SEEDS.values()), ids=tuple(SEEDS))
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test and seed. Pytest shows the printed seed where the test fails."""
    print(f"HPC_SERVE_FUZZ_SEED={request.param}")
    return random.Random(f"{request.param}-{request.node.originalname}")


def faulty_bytes(rng: random.Random, right: bytes) -> bytes:
    made = bytearray(right)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(made) + 1)
        end = min(len(made), start + rng.choice((0, 0, 1, 8, 200)))
        kind = rng.randrange(4)
        if kind == 0:
            made[start:end] = rng.choice(NASTY_BYTES)
        elif kind == 1:
            del made[start:end]
        elif kind == 2:
            made[start:start] = made[start:end] * rng.choice((1, 2, 50))
        else:
            made[start:end] = rng.randbytes(end - start + 1)
    return bytes(made)


def faulty_value(rng: random.Random, right: Any) -> Any:
    """`right`, a JSON value, with a few of the values in it replaced, removed or renamed."""
    made = copy.deepcopy(right)
    for _ in range(rng.randint(1, 3)):
        here = made
        while True:
            places = list(here) if isinstance(here, dict) else range(len(here))
            if not places:
                break
            place = rng.choice(list(places))
            if isinstance(here[place], dict | list) and here[place] and rng.random() < 0.6:
                here = here[place]
                continue
            if rng.random() < 0.15:
                del here[place]
            else:
                here[place] = copy.deepcopy(rng.choice(NASTY))  # it may be changed in its turn
            break
    return made


def faulty_json(rng: random.Random, right: Any) -> bytes:
    text = json.dumps(faulty_value(rng, right)).encode()
    return faulty_bytes(rng, text) if rng.random() < 0.4 else text


def only_our_errors(use: Callable[[], object], told: object) -> None:
    try:
        use()
    except HpcServeError:
        return
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {told!r}") from error


FAILED = make_record(state="failed", reason="why", last_log_lines=("a", "b"), measured={"x": 1})
ENDED = make_submitted(end=JobEnd(state="failed", reason="why", at=1.0), predicted={"x": 1})
RECORD, SUBMITTED = (json.loads(to_json_text(one)) for one in (FAILED, ENDED))


def rewritten(kind: Any, text: str) -> str:
    read = from_json_text(kind, text, source="a file")
    return to_json_text(read.without_secrets() if isinstance(read, EndpointRecord) else read)


def checked_arguments(text: str) -> None:
    check_file_arguments(read_args_file(text))


@pytest.mark.parametrize(("kind", "right"), [(EndpointRecord, RECORD), (SubmittedJob, SUBMITTED)])
def test_a_record_is_read_or_refused(rng, kind, right):
    for _ in range(CASES):
        text = faulty_json(rng, right).decode("utf-8", "replace")
        only_our_errors(functools.partial(rewritten, kind, text), text)


def test_status_of_whatever_lies_in_a_services_folder(rng, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HPC_SERVE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "services" / "405b"
    (folder / "submitted").mkdir(parents=True)
    for path in (tmp_path / "home", folder.parent, folder, folder / "submitted"):
        path.chmod(0o700)
    for _ in range(max(CASES // 10, 1)):
        for name in range(5):
            (folder / f"{name}-r0-0.json").write_bytes(faulty_json(rng, {**RECORD, "job_id": str(name)}))
            submitted = {**SUBMITTED, "job_id": str(name), "cluster": "local"}
            (folder / "submitted" / f"{name}.json").write_bytes(faulty_json(rng, submitted))
        only_our_errors(lambda: run(["status", "405b"]), "status")
        shown = capsys.readouterr()
        assert "unexpected" not in (shown.out + shown.err).lower(), shown
        assert "\x1b" not in shown.out + shown.err


def test_a_site_file_is_read_or_refused(rng, tmp_path):
    right = b"""partition: gpu
account: 0123
time: 24:00:00
mem: 0
cpus_per_task: 8
exclusive: yes
sbatch_extra: [--switches=1, --mail-type=END]
gpu: h100-80gb
gpus_per_node: 4
modules:
  - cuda/12.8
venv: ~/envs/serve
interface: ib0
log_dir: ~/logs
"""
    path = tmp_path / "site.yaml"
    for _ in range(CASES):
        content = faulty_bytes(rng, right)
        path.write_bytes(content)
        only_our_errors(lambda: load_site(path), content)


def test_a_models_config_is_read_or_refused(rng, tmp_path):
    right = find_model("8b").config
    path = tmp_path / "config.json"
    for _ in range(CASES):
        content = faulty_json(rng, dict(right))
        path.write_bytes(content)

        def use() -> None:
            found = find_model(str(tmp_path))
            model_from_config(found.config, name="m")

        only_our_errors(use, content)


def test_a_file_of_arguments_is_read_or_refused(rng):
    right = b"--max-num-seqs 8\n--dtype bfloat16 # why\n--hf-overrides '{\"a\": 1}'\n--enforce-eager\n--seed=1\n"
    for _ in range(CASES):
        text = faulty_bytes(rng, right).decode("utf-8", "replace")
        only_our_errors(functools.partial(checked_arguments, text), text)


def test_the_control_port_takes_launchers_after_whatever_came_before(rng):
    hello = {"rank": 1, "name": "n2", "address": "10.0.0.2", "nonce": "0" * 32, "proof": "0" * 64}
    unexpected: list[Any] = []

    async def stranger(port: int, line: bytes, *, hold: bool, has_ticket: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if has_ticket:
            writer.write(make_ticket("secret", rng.randbytes(16).hex()))
            await reader.readline()
        writer.write(line)
        if not hold:
            writer.write(b"\n")
        try:
            await asyncio.wait_for(reader.read(), 0.05 if hold else 60)  # a whole line that is wrong ends it
        except OSError:
            pass
        except asyncio.TimeoutError:
            assert hold, line
        writer.transport.abort()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unexpected.append(context))
        links: asyncio.Queue[Any] = asyncio.Queue()
        port = choose_port()
        server = ControlServer(make_node(), listen_on(port), links.put_nowait)
        for _ in range(CASES):
            line = rng.choice((faulty_json(rng, hello), faulty_bytes(rng, json.dumps(hello).encode()), b"[" * 100_000))
            await stranger(port, line, hold=rng.random() < 0.1, has_ticket=True)
            assert links.empty(), line
            ticket = faulty_bytes(rng, make_ticket("secret", "0" * 32))
            await stranger(port, rng.choice((ticket, line)), hold=rng.random() < 0.1, has_ticket=False)
            assert links.empty(), line
        node = await connect(make_worker(), port)
        link = await asyncio.wait_for(links.get(), 60)
        assert (link.rank, link.name) == (1, "n2")
        await node.close()
        await link.close()
        server.close()

    asyncio.run(run())
    assert unexpected == []


@contextmanager
def served_engine():
    protocols = pytest.importorskip("uvicorn.protocols.http.httptools_impl")

    async def engine(scope, receive, send):
        if scope["type"] == "http":
            body = b"" if scope["path"] == "/health" else b"let in"
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    protocol = connection_limits.limited(protocols.HttpToolsProtocol)
    with served(Gate(engine), http=protocol, lifespan="off") as port:
        yield port


def told(port: int, content: bytes) -> bytes:
    """What the engine answers until it closes, or until nothing comes any more."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        except OSError:
            pass
    return received


def test_nothing_but_the_key_opens_the_gate(rng, tmp_path, monkeypatch):
    (tmp_path / "key").write_text(KEY)
    monkeypatch.setenv("HPC_SERVE_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setattr(connection_limits, "HEADERS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection_limits, "CONNECTION_WITHOUT_KEY_S", 0.5)
    monkeypatch.setattr(connection_limits, "_LOG_INTERVAL_S", 1000.0)
    body = b'{"model": "m", "prompt": "hi"}'
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"
    rights = [
        b"POST /v1/completions HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer wrong-key-000000\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
        b"GET /health HTTP/1.1\r\nHost: e\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET http://e/health/../v1/models?a=%2e HTTP/1.1\r\nHost: e\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /v1/realtime HTTP/1.1\r\nHost: e\r\n" + upgrade + b"Content-Length: 3\r\n\r\nabc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    with served_engine() as port:
        for _ in range(CASES):
            content = faulty_bytes(rng, rng.choice(rights))
            assert b"let in" not in told(port, content), content
        monkeypatch.setattr(connection_limits, "HEADERS_TIMEOUT_S", 60.0)
        monkeypatch.setattr(connection_limits, "CONNECTION_WITHOUT_KEY_S", 60.0)
        with_key = f"GET /v1/models HTTP/1.1\r\nHost: e\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(with_key.encode())
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        assert b"let in" in received
