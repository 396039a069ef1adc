"""The gate, alone (plain ASGI calls), under a real uvicorn, and in front of every route of the real vLLM."""

import ast
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_serve.client.replicas.probe import probe
from hpc_serve.gate import gate
from hpc_serve.gate.gate import Gate
from hpc_serve.rendezvous.gate_headers import (
    CANARY_HEADER,
    DRAINING_HEADER,
    ENGINE_HEADER,
    LAUNCHER_HEADER,
    LAUNCHER_VARIABLE,
    REQUESTS_HEADER,
    RequestCount,
    read_request_count,
)
from hpc_serve.trust.connection import Identity
from tests.support.asgi_server import served
from tests.unit.job.conftest import KEY, tls_options

BEARER = (b"authorization", f"Bearer {KEY}".encode())
LAUNCHERS = (LAUNCHER_HEADER, b"secret")


@pytest.fixture
def drain_file(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "_DRAIN_CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "drain"
    monkeypatch.setenv("HPC_SERVE_DRAIN_FILE", str(path))
    return path


async def _engine(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-engine", b"1")]})
    await send({"type": "http.response.body", "body": b"let in"})


def ask(app, /, path="/v1/models", headers=(), **scope):
    """Call the app as a server would; returns what it sent."""
    return asyncio.run(call(app, path, headers, **scope))


async def call(app, path, headers, /, **scope):
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers), "root_path": "", **scope}
    await app(scope, receive, send)
    return sent


def count_in(sent) -> RequestCount:
    """The count of requests in the head of an answer."""
    return read_request_count({name.decode(): value.decode() for name, value in sent[0]["headers"]})


@pytest.mark.parametrize("header", [BEARER, (b"Authorization", f"bearer  {KEY}".encode())])
def test_the_right_key_is_let_in(key_file, header):
    app = Gate(_engine)
    key_file.write_text("another-0123456789")  # the key is that of the start
    assert ask(app, headers=[header])[1]["body"] == b"let in"


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/sql"])
def test_adapters_are_the_launchers_to_load(key_file, path, monkeypatch):
    monkeypatch.setenv(LAUNCHER_VARIABLE, "secret")
    for others in ((), (CANARY_HEADER,), ((LAUNCHER_HEADER, b""),), ((LAUNCHER_HEADER, b"guess"),)):
        refused = ask(Gate(_engine), path, headers=[BEARER, *others], method="POST")
        assert refused[0]["status"] == 403
        assert b"hpc-serve adapter add" in refused[1]["body"]
    assert ask(Gate(_engine), path, headers=[BEARER, LAUNCHERS], method="POST")[0]["status"] == 200
    assert ask(Gate(_engine), path, headers=[LAUNCHERS], method="POST")[0]["status"] == 401
    monkeypatch.delenv(LAUNCHER_VARIABLE)
    assert ask(Gate(_engine), path, headers=[BEARER, (LAUNCHER_HEADER, b"")], method="POST")[0]["status"] == 403


def test_an_adapter_that_was_replaced_is_not_read_again_at_every_step(key_file, monkeypatch):
    monkeypatch.setenv(LAUNCHER_VARIABLE, "secret")
    adapter = SimpleNamespace(load_inplace=True)
    app = SimpleNamespace(state=SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests={"sql": adapter})))
    for_launcher = {"headers": [BEARER, LAUNCHERS], "method": "POST"}
    ask(Gate(_engine), "/v1/load_lora_adapter", **for_launcher, app=app)
    assert adapter.load_inplace is False
    for other in (SimpleNamespace(), SimpleNamespace(state=SimpleNamespace())):  # of another vLLM
        assert ask(Gate(_engine), "/v1/load_lora_adapter", **for_launcher, app=other)[0]["status"] == 200


def test_an_engine_that_was_paused_counts_as_paused_until_it_goes_on(key_file):
    statuses = {"/pause": 200, "/resume": 200}

    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": statuses.get(scope["path"], 200), "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = Gate(engine)

    def words() -> bytes:
        return dict(ask(app, "/health", headers=[BEARER])[0]["headers"])[ENGINE_HEADER]

    ask(app, "/pause", headers=[BEARER], method="POST")
    assert words() == b"paused"
    statuses["/resume"] = 500
    ask(app, "/resume", headers=[BEARER], method="POST")
    assert words() == b"paused"
    statuses["/resume"] = 200
    ask(app, "/resume", headers=[BEARER], method="POST")
    assert words() != b"paused"
    ask(app, "/pause", method="POST")  # without the key
    assert words() != b"paused"


@pytest.mark.parametrize(
    "value",
    [b"", b"Bearer", b"Bearer ", b"Bearer \xff"]
    + [word + KEY.encode() for word in (b"", b"Basic ", b"Bearer x", b"Bearer\t", b"Bearer Bearer ")],
)
def test_another_key_is_refused_in_the_shape_of_openai(key_file, value):
    start, body = ask(Gate(_engine), headers=[(b"authorization", value)])
    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    error = json.loads(body["body"])["error"]
    assert error["code"] == "invalid_api_key"
    assert "hpc-serve env" in error["message"]
    assert KEY not in body["body"].decode()


@pytest.mark.parametrize(
    ("path", "scope", "status"),
    [
        *(("/v1/models", {"method": method}, 401) for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT", "CONNECT")),
        *((path, {}, 401) for path in ("/health/", "//health", "/Health", "/healthz", "/health/../metrics")),
        *((path, {}, 401) for path in ("/health;x", "/health\n", "health", "")),
        *(("/health", {"method": method}, 200) for method in ("GET", "HEAD")),
        ("/health", {"method": "POST"}, 401),
        ("/health", {"root_path": "/health"}, 401),
    ],
)
def test_without_the_key_health_alone_is_open_for_reading(key_file, path, scope, status):
    assert ask(Gate(_engine), path, **scope)[0]["status"] == status


@pytest.mark.parametrize("content", [None, "", " \n", "no variable"])
def test_without_a_key_every_request_is_refused(key_file, content, caplog, monkeypatch):
    key_file.unlink()
    if content == "no variable":
        monkeypatch.delenv("HPC_SERVE_API_KEY_FILE")
    elif content is not None:
        key_file.write_text(content)
    app = Gate(_engine)
    assert "refuses every request" in caplog.text
    for headers in ([], [BEARER], [(b"authorization", b"Bearer ")], [(b"authorization", b"Bearer None")]):
        assert ask(app, headers=headers)[0]["status"] == 401


def test_draining_turns_new_requests_away_and_leaves_health_and_figures(key_file, drain_file):
    app = Gate(_engine)
    assert ask(app, headers=[BEARER])[0]["status"] == 200
    assert DRAINING_HEADER not in ask(app, "/health")[0]["headers"]
    drain_file.touch()
    start, body = ask(app, headers=[BEARER])
    assert start["status"] == 503
    assert DRAINING_HEADER in start["headers"]
    assert any(name == b"retry-after" for name, _ in start["headers"])
    assert json.loads(body["body"])["error"]["code"] == "draining"
    assert ask(app)[0]["status"] == ask(app, "/metrics")[0]["status"] == 401, "nobody's business without the key"
    assert ask(app, "/metrics", headers=[BEARER])[0]["status"] == 200
    for other, method in (("/metrics/", "GET"), ("/v1/metrics", "GET"), ("/metrics", "POST")):
        assert ask(app, other, headers=[BEARER], method=method)[0]["status"] == 503
    health = ask(app, "/health")[0]
    assert health["status"] == 200
    assert {(b"x-engine", b"1"), DRAINING_HEADER} <= set(health["headers"])


def test_requests_under_way_outlive_the_drain(key_file, drain_file):
    refused = []

    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        drain_file.touch()
        refused.append((await call(app, "/", [BEARER]))[0]["status"])
        await send({"type": "http.response.body", "body": b"last"})

    app = Gate(engine)
    assert ask(app, headers=[BEARER])[-1]["body"] == b"last"
    assert refused == [503]


def test_the_drain_file_is_looked_up_a_few_times_a_second(key_file, drain_file, monkeypatch):
    monkeypatch.setattr(gate, "_DRAIN_CHECK_INTERVAL_S", 3600.0)
    looks = []
    monkeypatch.setattr(os.path, "exists", lambda path: looks.append(path))
    app = Gate(_engine)
    for _ in range(5):
        ask(app, headers=[BEARER])
    assert looks == [str(drain_file)]


def test_a_websocket_is_refused_in_its_handshake(key_file, drain_file):
    app = Gate(_engine)
    closed = {"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"}
    assert ask(app, "/v1/realtime", type="websocket") == [closed]
    assert ask(app, "/health", type="websocket")[0]["code"] == 1008
    start, body = ask(app, "/v1/realtime", type="websocket", extensions={"websocket.http.response": {}})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"
    drain_file.touch()
    assert ask(app, "/v1/realtime", headers=[BEARER], type="websocket")[0]["code"] == 1013


def test_requests_with_the_key_are_counted_and_canaries_and_reading_are_not(key_file):
    app = Gate(_engine)
    for path in ("/v1/completions", "/v1/embeddings"):
        ask(app, path, headers=[BEARER], method="POST")
    ask(app, "/v1/completions", headers=[BEARER, CANARY_HEADER], method="POST")
    ask(app, "/v1/completions", method="POST")
    for path, method in (("/v1/models", "GET"), ("/v1/models", "HEAD"), ("/health", "GET")):
        ask(app, path, headers=[BEARER], method=method)
    found, of_another = (count_in(ask(gate, "/metrics", headers=[BEARER])) for gate in (app, Gate(_engine)))
    assert (found.count, found.under_way) == (2, 0)
    assert found.gate != of_another.gate


@pytest.mark.parametrize("path", ["/answers", "/breaks"])
def test_a_request_is_under_way_until_it_is_answered_or_breaks(key_file, path):
    meanwhile = []

    async def engine(scope, receive, send):
        if scope["method"] == "POST":
            meanwhile.append(count_in(await call(app, "/metrics", [BEARER])))
        if scope["path"] == "/breaks":
            raise RuntimeError("the engine broke")
        await _engine(scope, receive, send)

    app = Gate(engine)
    with contextlib.suppress(RuntimeError):
        ask(app, path, headers=[BEARER], method="POST")
    counts = [*meanwhile, count_in(ask(app, "/metrics", headers=[BEARER]))]
    assert [(found.count, found.under_way) for found in counts] == [(1, 1), (1, 0)]


@pytest.mark.parametrize("text", ["", "5f3a 17", "5f3a -1 0", "a b 1 2", "5f3a 1 2 3", "5f3a 9999999999999999 1"])
def test_what_is_no_count(text):
    assert read_request_count({REQUESTS_HEADER.decode(): text}) is None


def test_the_servers_own_start_passes(key_file):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    ask(Gate(app), type="lifespan")
    assert seen == ["lifespan"]
    with pytest.raises(RuntimeError, match="webtransport"):
        ask(Gate(app), type="webtransport")


# Under a real server: what paths look like after its parsing is what counts.


def starlette_app():
    """Routes as vLLM has them: a mount, a websocket, and redirects of slashes."""
    pytest.importorskip("starlette")
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route, WebSocketRoute

    secret = PlainTextResponse("secret")

    async def talk(websocket):
        await websocket.accept()
        await websocket.send_text("secret")
        await websocket.close()

    app = Starlette(
        routes=[
            Route("/health", PlainTextResponse("well")),
            Route("/health/{rest:path}", secret),
            Route("/invocations", secret),
            WebSocketRoute("/v1/realtime", talk),
            Mount("/metrics", app=secret),
            Route("/{rest:path}", secret),
        ]
    )
    app.add_middleware(Gate)
    return app


def exchange(port, request, until=None):
    """Send bytes, return all that comes back, or what came up to `until`."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        received = b""
        while (until is None or until not in received) and (chunk := connection.recv(65536)):
            received += chunk
    return received


def get(port, target, *headers, method="GET", version="1.1"):
    lines = [f"{method} {target} HTTP/{version}", "Host: engine", "Connection: close", *headers]
    return exchange(port, ("\r\n".join(lines) + "\r\n\r\n").encode())


TRICKY_TARGETS = (
    *("/health/", "/health//", "//health", "/./health", "/health/.", "/health/../invocations", "/health%00"),
    *("/health/..%2finvocations", "/health%2f..%2finvocations", "/health%2finvocations", "/health%3f/../invocations"),
    *("/health%0a", "/health;/invocations", "/invocations?x=/health", "/invocations#/health", "/metrics", "/metrics/"),
    *("/metrics/health", "http://engine/invocations", "http://health/invocations", "/%69nvocations", "/HEALTH", "*"),
)


@pytest.fixture(params=["h11", "httptools"])
def http(request):
    """uvicorn's parsers of HTTP."""
    pytest.importorskip(request.param)
    return request.param


def test_no_spelling_of_a_path_gets_round_the_key(key_file, http):
    with served(starlette_app(), http=http) as port:
        for target in TRICKY_TARGETS:
            answer = get(port, target)
            assert b"secret" not in answer, (target, answer)
            assert answer.split(b" ", 2)[1] in (b"401", b"400"), (target, answer)
        assert b"well" in get(port, "/health")
        assert b"well" in get(port, "/health?verbose=1")
        assert b"secret" in get(port, "/invocations", f"Authorization: Bearer {KEY}")
        assert b"secret" not in get(port, "/invocations", f"X-Forwarded-Authorization: Bearer {KEY}")
        assert b" 401 " in get(port, "/v1/models", method="OPTIONS")
        assert b"secret" not in get(port, "/health", method="POST")


@pytest.mark.parametrize("root_path", ["/health", "/proxy", "/"])
def test_no_root_path_gets_round_the_key(key_file, http, root_path):
    app = starlette_app()

    async def rooted(scope, receive, send):  # as FastAPI does it with --root-path
        await app({**scope, "root_path": root_path} if scope["type"] != "lifespan" else scope, receive, send)

    with served(rooted, http=http) as port:
        for target in [*TRICKY_TARGETS, f"{root_path}/invocations", f"{root_path}/health/x", f"{root_path}invocations"]:
            assert b"secret" not in get(port, target), target
        assert b"secret" not in get(port, "/health")


def test_the_clients_probe_understands_the_gate(key_file, drain_file, certificate, http):
    def probe_with(key):
        identity = Identity(certificate=certificate.certificate, api_key=key)
        return probe("127.0.0.1", port, identity, timeout_s=60).status

    with served(starlette_app(), http=http, **tls_options(certificate)) as port:
        assert probe_with(KEY) == "ready"
        assert probe_with("another-key-0123456789") == "other key"
        drain_file.touch()
        assert probe_with(KEY) == "draining"


def test_a_refused_upload_still_reads_its_refusal(key_file):
    body = b"x" * 5_000_000
    head = f"POST /v1/files HTTP/1.1\r\nHost: engine\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with served(starlette_app()) as port:
        assert b"invalid_api_key" in exchange(port, head.encode() + body)


def test_a_websocket_needs_the_key_under_a_real_server(key_file):
    pytest.importorskip("websockets")
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
    lines = ["GET /v1/realtime HTTP/1.1", "Host: engine", "Connection: Upgrade", *upgrade]
    request = ("\r\n".join(lines) + "\r\n\r\n").encode()
    with served(starlette_app()) as port:
        refused = exchange(port, request, until=b"\r\n\r\n")
        assert refused.split(b" ", 2)[1] in (b"401", b"403")
        assert b"secret" not in refused
        entered = exchange(port, request[:-2] + f"Authorization: Bearer {KEY}\r\n\r\n".encode(), until=b"secret")
        assert b" 101 " in entered
        assert b"secret" in entered


@pytest.mark.engine
def test_every_route_of_vllm_but_health_asks_for_the_key(key_file, monkeypatch):
    """The real app with all its optional routes; no engine behind it, so a request that were let in would show."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    pytest.importorskip("vllm")
    from starlette.testclient import TestClient
    from starlette.websockets import WebSocketDisconnect
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", "none", "--middleware", "hpc_serve.gate.gate.Gate"]
    )
    app = build_app(args, ("generate", "embed", "classify", "transcription", "realtime", "render"))
    client = TestClient(app, raise_server_exceptions=False)
    asked = set()
    for path, methods, kind in _routes(app.routes):
        path = path.replace("{", "").replace("}", "").replace(":path", "")
        if kind == "websocket":
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
                pass
            continue
        for method in {*methods, "OPTIONS", "GET", "POST"}:
            answer = client.request(method, path, follow_redirects=False)
            if path == "/health" and method in ("GET", "HEAD"):
                assert answer.status_code != 401
                continue
            assert answer.status_code == 401, (method, path, answer.status_code)
            asked.add(path)
    assert {"/invocations", "/tokenize", "/metrics", "/v1/chat/completions", "/version", "/openapi.json"} <= asked
    with_key = {"Authorization": f"Bearer {KEY}"}
    assert client.get("/version", headers=with_key).status_code == 200
    before = read_request_count(client.get("/metrics", headers=with_key).headers)
    client.post("/tokenize", headers=with_key)
    after = read_request_count(client.get("/metrics", headers=with_key).headers)
    assert (before.count, after.count, after.under_way) == (0, 1, 0)


def _routes(routes):
    for route in routes:
        if hasattr(route, "methods") and route.methods is not None:
            yield route.path, route.methods, "http"
        elif type(route).__name__.endswith("WebSocketRoute"):
            yield route.path, set(), "websocket"
        elif hasattr(route, "path"):  # a mount
            yield route.path or "/", {"GET"}, "http"
            yield route.path + "/x", {"GET"}, "http"


def test_the_gate_imports_nothing_but_the_standard_library_and_this_package(tmp_path):
    """In a Python that finds nothing else, as in a container that knows nothing of us."""
    code = (
        f"import sys; sys.path.append({str(Path(gate.__file__).parents[2])!r}); import hpc_serve.gate.gate;"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ast.literal_eval(done.stdout) == ["__main__", "hpc_serve"]
