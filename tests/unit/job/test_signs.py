"""Signs within answers under a real uvicorn, plain and over TLS: where they come, where they must not, and when."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_serve.gate import connection_limits, engine_facts
from hpc_serve.gate.connection_limits import Asked, Signs
from hpc_serve.gate.engine_facts import Process
from hpc_serve.gate.gate import Gate
from hpc_serve.rendezvous.gate_headers import COMMENT_CHUNK, PROCESSING
from tests.support import asgi_server
from tests.unit.job.conftest import KEY, tls_options

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")
prometheus_client = pytest.importorskip("prometheus_client")
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: E402

AUTH = f"Authorization: Bearer {KEY}\r\n"
ASK = "X-HPC-Serve-Signs: 1\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
SIGNS = (PROCESSING, COMMENT_CHUNK)


pytestmark = pytest.mark.usefixtures("key_file")


EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
# By path: the headers of the answer, and its two parts.
ANSWERS: dict[str, tuple[list, bytes, bytes]] = {
    "/v1/events": ([EVENTS], b"data: 1\n\n", b"data: 2\n\n"),
    "/v1/encoded": ([EVENTS, (b"content-encoding", b"gzip")], b"data: 1\n\n", b"data: 2\n\n"),
    "/v1/length": ([EVENTS, (b"content-length", b"10")], b"data:", b"12345"),
    "/v1/half": ([EVENTS], b"data: ", b"1\n\n"),
}


class Vllm:
    """vLLM's application as far as the gate knows it. Each path answers in its own way, once it `may_go_on`."""

    gate: Gate
    answer: Any

    def __init__(self) -> None:
        self.answer = self.answer_by_path
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            parallel_config=SimpleNamespace(
                distributed_executor_backend="mp", nnodes=1, data_parallel_size=1, data_parallel_size_local=1
            ),
            device_config=SimpleNamespace(device_type="cuda"),
        )
        self.requests: dict[str, SimpleNamespace] = {}
        processor = SimpleNamespace(request_states=self.requests)
        self.state = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config, output_processor=processor))
        self.seen: list[dict] = []
        self.may_go_on = threading.Event()

    async def go_on(self) -> None:
        await asyncio.to_thread(self.may_go_on.wait)

    async def __call__(self, scope, receive, send):
        scope["app"] = self
        await self.gate(scope, receive, send)

    async def answer_by_path(self, scope, receive, send):
        self.seen.append(scope)
        headers, first, last = ANSWERS.get(scope["path"], ([(b"content-type", b"application/json")], b"", b""))
        while scope["path"] == "/v1/upload" and (await receive()).get("more_body"):
            pass
        if scope["path"] in ("/v1/whole", "/v1/upload", "/v1/fails"):
            await self.go_on()
        if scope["path"] == "/v1/fails":
            raise RuntimeError("the application fails")
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        await self.go_on()
        await send({"type": "http.response.body", "body": last, "more_body": False})


@contextlib.contextmanager
def served(vllm: Vllm, **options):
    """vLLM's application behind the gate, in a uvicorn with the limits; yields the port."""
    vllm.gate = Gate(vllm.answer)
    protocol = connection_limits.limited(HttpToolsProtocol)
    with asgi_server.served(vllm, http=protocol, lifespan="off", **options) as port:
        try:
            yield port
        finally:
            vllm.may_go_on.set()


@pytest.fixture
def vllm():
    return Vllm()


@pytest.fixture
def port(vllm):
    with served(vllm) as port:
        yield port


class Client:
    """A connection, and all bytes that came on it."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket)
        self.received = b""

    def ask(self, path: str, *, more: str = ASK + AUTH, method: str = "GET", version: str = "1.1") -> Client:
        self.socket.sendall(f"{method} {path} HTTP/{version}\r\nHost: e\r\n{more}\r\n".encode())
        return self

    def until(self, words: bytes, count: int = 1) -> bytes:
        """Everything, once these words have come so often."""
        while self.received.count(words) < count and (chunk := self.socket.recv(65536)):
            self.received += chunk
        assert self.received.count(words) >= count, self.received
        return self.received

    def quiet(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        self.socket.settimeout(seconds)
        try:
            chunk = self.socket.recv(65536)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(60)
        self.received += chunk
        return False


@pytest.fixture(params=["plain", "tls"])
def served_both(request, certificate):
    """What serves an application, and what a client needs."""
    if request.param == "plain":
        return served, None
    client = ssl.create_default_context(cadata=certificate.certificate)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return (lambda vllm: served(vllm, **tls_options(certificate))), client


def test_a_request_that_asks_gets_signs_before_and_within_its_answer(served_both):
    serve, tls = served_both
    vllm = Vllm()
    with serve(vllm) as port:
        whole = Client(port, tls).ask("/v1/whole")
        assert whole.until(PROCESSING, 2) == PROCESSING * 2
        events = Client(port, tls).ask("/v1/events")
        text = events.until(COMMENT_CHUNK, 2)
        assert text.partition(b"\r\n\r\n")[2] == b"9\r\ndata: 1\n\n\r\n" + COMMENT_CHUNK * 2
        vllm.may_go_on.set()
        assert OK in whole.until(b"0\r\n\r\n")
        assert events.until(b"0\r\n\r\n").endswith(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        # The connection is kept, and a quick request on it has no sign.
        assert not any(sign in Client(port, tls).ask("/v1/events").until(b"0\r\n\r\n") for sign in SIGNS)
        whole.received = b""
        assert PROCESSING not in whole.ask("/v1/whole").until(b"0\r\n\r\n")
    assert all("signs" not in str(scope["headers"]) and "write_sign" not in str(scope) for scope in vllm.seen)


@pytest.mark.parametrize(
    ("path", "more", "version"),
    [
        ("/v1/whole", AUTH, "1.1"),  # it does not ask
        ("/v1/whole", "X-HPC-Serve-Signs: 0\r\n" + AUTH, "1.1"),
        ("/v1/whole", ASK + AUTH, "1.0"),
        ("/v1/json", ASK + AUTH, "1.1"),
        ("/v1/encoded", ASK + AUTH, "1.1"),
        ("/v1/length", ASK + AUTH, "1.1"),
        ("/v1/half", ASK + AUTH, "1.1"),  # in the middle of an event
        ("/v1/events", ASK + AUTH, "1.0"),
    ],
)
def test_where_no_sign_may_stand_there_is_none(vllm, port, path, more, version):
    watched = Client(port).ask("/v1/whole")
    client = Client(port).ask(path, more=more, version=version)
    watched.until(PROCESSING, 3)
    vllm.may_go_on.set()
    client.socket.settimeout(5)
    text = client.until(b"200 OK")
    assert client.quiet(1.0) or client.received
    assert not any(sign in text + client.received for sign in SIGNS)


def test_a_head_request_has_signs_before_its_answer_alone(vllm, port):
    events = Client(port).ask("/v1/events", method="HEAD")
    events.until(b"\r\n\r\n")
    assert events.quiet(1.2)
    client = Client(port).ask("/v1/whole", method="HEAD")
    client.until(PROCESSING, 2)
    vllm.may_go_on.set()
    assert client.until(b"200 OK").startswith(PROCESSING * 2 + OK)


def test_a_connection_that_closes_after_its_answer_has_signs(vllm, port):
    client = Client(port).ask("/v1/whole", more=ASK + AUTH + "Connection: close\r\n")
    client.until(PROCESSING, 2)
    vllm.may_go_on.set()
    assert b"connection: close" in client.until(b"0\r\n\r\n")


def test_requests_in_one_packet_have_each_their_signs_in_their_order(vllm, port):
    client = Client(port)
    one = f"GET /v1/{{}} HTTP/1.1\r\nHost: e\r\n{ASK}{AUTH}\r\n"
    client.socket.sendall((one.format("events") + one.format("whole")).encode())
    client.until(COMMENT_CHUNK, 3)
    assert PROCESSING not in client.received
    vllm.may_go_on.set()
    first, rest = client.until(b"0\r\n\r\n", 2).split(b"0\r\n\r\n", 1)
    assert first.endswith(b"data: 2\n\n\r\n")
    assert rest.startswith((OK, PROCESSING))


def test_signs_come_while_a_body_is_still_arriving(vllm, port):
    client = Client(port).ask("/v1/upload", method="POST", more=ASK + AUTH + "Content-Length: 10\r\n")
    client.socket.sendall(b"12345")
    assert client.until(PROCESSING, 2) == PROCESSING * 2
    vllm.may_go_on.set()
    client.socket.sendall(b"67890")
    client.until(OK)


@pytest.mark.parametrize("key", ["", "Authorization: Bearer another\r\n"])
def test_without_the_key_there_are_no_signs_even_if_the_body_never_ends(vllm, port, key):
    client = Client(port).ask("/v1/upload", method="POST", more=ASK + key + "Content-Length: 10\r\n")
    assert client.quiet(1.5)
    client.socket.sendall(b"1234567890")
    assert client.until(b"\r\n\r\n").startswith(b"HTTP/1.1 401")


def test_an_application_that_fails_after_signs_is_answered_with_500(vllm, port):
    client = Client(port).ask("/v1/fails")
    client.until(PROCESSING)
    vllm.may_go_on.set()
    assert client.until(b"Internal Server Error").replace(PROCESSING, b"").startswith(b"HTTP/1.1 500")


def test_a_websocket_handshake_that_asks_has_no_signs():
    vllm = Vllm()
    with served(vllm, ws="none") as port:
        more = ASK + AUTH + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        client = Client(port).ask("/v1/whole", more=more + "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n")
        vllm.may_go_on.set()
        client.until(b"\r\n\r\n")  # nothing breaks: this server knows no websockets, and answers


def test_a_client_that_reads_nothing_gets_no_signs_on_top():
    size, paused = 1 << 20, threading.Event()
    vllm = Vllm()

    async def pour(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for part in range(16):
            paused.set()
            await send({"type": "http.response.body", "body": b"a" * (size - 2) + b"\n\n", "more_body": part < 15})

    vllm.answer = pour
    with served(vllm) as port:
        client = Client(port)
        client.ask("/v1/events")
        assert paused.wait(60)
        time.sleep(2)  # four signs, if it read
        parts = [client.socket.recv(1 << 20)]
        while not parts[-1].endswith(b"0\r\n\r\n"):
            parts.append(client.socket.recv(1 << 20))
        text = b"".join(parts)
        assert len(text) > 16 * size
        assert COMMENT_CHUNK not in text


def test_many_that_ask_and_leave_disturb_nobody(vllm, port):
    for _ in range(20):
        clients = [Client(port).ask("/v1/whole") for _ in range(50)]
        clients[-1].until(PROCESSING)
        for client in clients:
            client.socket.close()
    staying = Client(port).ask("/v1/whole")
    staying.until(PROCESSING, 2)
    vllm.may_go_on.set()
    staying.until(OK)


async def test_a_timer_runs_while_a_request_asks_and_only_then():
    async def send(message):
        pass

    signs, written = Signs(lambda: False), asyncio.Event()
    assert signs.timer is None
    asked = [Asked(lambda is_at_comment: written.set(), send, asyncio.get_running_loop()) for _ in range(3_000)]
    for one in asked:
        signs.add(one)
    await asyncio.wait_for(written.wait(), 60)
    assert signs.timer is not None
    for one in asked:
        signs.remove(one)
    while signs.timer is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


# -- signs follow the judgement


@pytest.fixture
def counter():
    registry = prometheus_client.REGISTRY
    counter = prometheus_client.Counter("vllm:generation_tokens", "tokens", registry=registry)
    yield counter
    registry.unregister(counter)


def _due(vllm: Vllm) -> None:
    vllm.requests["r"] = SimpleNamespace(prompt_len=10, is_prefilling=True, stats=None)


def test_signs_stop_with_the_engine_and_come_back_with_its_next_step(counter, monkeypatch):
    state = ["S"]
    monkeypatch.setattr(
        engine_facts, "read_processes", lambda: {7: Process(name="VLLM::EngineCor", state=state[0], cpu_s=time.time())}
    )
    vllm = Vllm()
    with served(vllm) as port:
        client = Client(port).ask("/v1/whole")
        _due(vllm)
        client.until(PROCESSING, 4)  # a step of 2 s that uses CPU
        state[0] = "T"
        while not client.quiet(1.5):
            pass
        health = Client(port).ask("/health", more=AUTH).until(b"\r\n\r\n")
        assert b"x-hpc-serve-engine: its engine's process VLLM::EngineCor is stopped" in health
        state[0] = "S"
        assert client.quiet(1.0)  # it has made no step yet
        counter.inc()
        before = client.received.count(PROCESSING)
        client.until(PROCESSING, before + 2)


def test_health_says_whether_the_engine_is_busy_to_who_has_the_key(vllm, port, counter):
    assert b"x-hpc-serve-engine: idle" in Client(port).ask("/health", more=AUTH).until(b"\r\n\r\n")
    assert b"x-hpc-serve-engine" not in Client(port).ask("/health", more="").until(b"\r\n\r\n")
    _due(vllm)
    time.sleep(0.5)
    assert b"x-hpc-serve-engine: busy" in Client(port).ask("/health", more=AUTH).until(b"\r\n\r\n")


def test_an_engine_of_another_vllm_is_never_called_hung(counter, caplog):
    vllm = Vllm()
    del vllm.state.engine_client.output_processor
    with served(vllm) as port:
        Client(port).ask("/v1/whole").until(PROCESSING, 3)
    assert caplog.text.count("a hung engine is not noticed") == 1
