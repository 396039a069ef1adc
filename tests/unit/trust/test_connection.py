"""A connection is verified before it carries anything: by a certificate or, in the clear, by a proof of its ends."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hpc_serve.job.gate
from hpc_serve.job.gate import Gate
from hpc_serve.rendezvous.gate_headers import prove_connection
from hpc_serve.rendezvous.host import host_id
from hpc_serve.trust.authority import RunCertificate, make_run_certificate
from hpc_serve.trust.connection import (
    Challenge,
    Identity,
    NotOurEngineError,
    VerifiedConnection,
    WrongProofError,
    make_challenge,
)
from tests.support.asgi_server import answering, served
from tests.support.relay import Relay
from tests.support.tls_servers import RecordingServer, server_context

KEY = "k-0123456789abcdef"
RECORD = "123-r0-0.json"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api_key").write_text(KEY)
    monkeypatch.setenv("HPC_SERVE_API_KEY_FILE", str(tmp_path / "api_key"))
    monkeypatch.setenv("HPC_SERVE_RECORD", RECORD)


_engine = answering(b"answer")


def plain(key: str = KEY, record: str = RECORD) -> Identity:
    return Identity(record=record, certificate=None, api_key=key, host=host_id())


def ask(port: int, identity: Identity, *, host: str = "127.0.0.1", requests: int = 1) -> bytes:
    with closing(VerifiedConnection(host, port, identity, timeout_s=60)) as connection:
        for _ in range(requests):
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {identity.api_key}"})
            answer = connection.getresponse().read()
    return answer


# In the clear, against the gate under a real server


@pytest.fixture
def port(gate: None) -> Iterator[int]:
    with served(Gate(_engine)) as port:
        yield port


@pytest.mark.parametrize("http_protocol", ["h11", "httptools"])
def test_our_engine_is_asked_on_the_connection_that_it_proved_itself_on(gate: None, http_protocol: str) -> None:
    pytest.importorskip(http_protocol)
    with served(Gate(_engine), http=http_protocol) as port:
        assert ask(port, plain(), requests=3) == b"answer"


def test_a_listener_for_both_families_names_the_same_ends(gate: None) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(Gate(_engine), log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert ask(port, plain(), host="127.0.0.1") == b"answer"
        assert ask(port, plain(), host="::1") == b"answer"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()


@pytest.mark.parametrize("identity", [plain(key="another-key-0123456789"), plain(record="124-r0-0.json")])
def test_another_key_or_record_is_no_proof(port: int, identity: Identity) -> None:
    with pytest.raises(WrongProofError):
        ask(port, identity)


def test_an_engine_of_another_mode_proves_nothing(gate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPC_SERVE_RECORD")
    with served(Gate(_engine)) as port, pytest.raises(NotOurEngineError, match="does not prove"):
        ask(port, plain())


def test_a_relay_to_our_engine_is_not_our_engine(port: int) -> None:
    """The stranger on a freed port passes the challenge on to a living replica of the same key."""
    relay = Relay(port)
    try:
        with pytest.raises(WrongProofError):
            ask(relay.port, plain())
    finally:
        relay.close()
    assert KEY.encode() not in relay.heard
    assert b"/v1/models" not in relay.heard


def test_a_relay_of_two_hosts_that_have_the_same_address_is_not_our_engine(
    gate: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger on our host and one on the engine's: the engine's connection has the very ends that ours has."""
    monkeypatch.setattr(hpc_serve.job.gate, "host_id", lambda: "the engine's host")
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append(scope.get("path", scope["type"]))
        await _engine(scope, receive, send)

    with served(Gate(app)) as port:
        for host in ("127.0.0.1", "localhost"):
            for told in ("the engine's host", None):
                with pytest.raises(NotOurEngineError):
                    ask(port, replace(plain(), host=told), host=host)
    assert "/v1/models" not in heard
    assert "/health" not in heard, "not even the challenge was sent"


@pytest.mark.parametrize("server", ["10.0.0.1", "::ffff:10.0.0.1", "127.0.0.1", "127.5.5.5", "::1"])
def test_an_engine_of_another_host_is_not_asked_at_an_address_of_ours(server: str) -> None:
    ends: dict[str, Any] = {"client": ("10.0.0.1", 40_000), "server": (server, 10_249)}
    assert make_challenge(plain(), **ends)
    for host in ("another host", None):
        with pytest.raises(NotOurEngineError, match="another host"):
            make_challenge(replace(plain(), host=host), **ends)
        assert make_challenge(replace(plain(), host=host), **ENDS), "another host is asked at its own address"


def test_a_proof_of_another_host_is_refused() -> None:
    challenge = make_challenge(replace(plain(), host="another host"), **ENDS)
    with pytest.raises(WrongProofError):
        challenge.read(answer_to(challenge))


def test_another_network_namespace_counts_as_another_host() -> None:
    """The containers of one host share its boot id, and each has a 127.0.0.1 of its own."""
    told = "from hpc_serve.rendezvous.host import host_id; print(host_id())"
    other = subprocess.run(["unshare", "-rn", sys.executable, "-c", told], capture_output=True, text=True)
    if other.returncode:
        pytest.skip("no namespaces here")
    ours = host_id()
    assert ours is not None
    assert other.stdout.strip() != ours
    assert other.stdout.split()[0] == ours.split()[0]


@pytest.mark.parametrize(
    "header", ["X-Forwarded-For: {}:{}", "Forwarded: for={}:{}", "x-forwarded-for: 1.2.3.4, {}:{}"]
)
def test_a_relay_cannot_name_our_end_in_a_header(port: int, header: str) -> None:
    """Uvicorn believes X-Forwarded-For of local programs, ports included."""

    def change(data: bytes, client: socket.socket) -> bytes:
        return data.replace(b"\r\n", f"\r\n{header.format(*client.getpeername())}\r\n".encode(), 1)

    relay = Relay(port, change=change)
    try:
        with pytest.raises(NotOurEngineError, match="does not prove"):
            ask(relay.port, plain())
    finally:
        relay.close()
    assert KEY.encode() not in relay.heard


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x16\x03\x01\x00\x05hello",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-hpc-serve-proof: 00\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-hpc-serve-proof: \xff\xe9\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"x" * 100_000,
    ],
)
def test_whatever_a_stranger_answers_it_gets_no_key(answer: bytes) -> None:
    server = RecordingServer(answer=answer)
    try:
        with pytest.raises(ConnectionError):
            ask(server.port, plain())
    finally:
        server.close()
    assert KEY.encode() not in server.received
    assert b"/v1/models" not in server.received


def test_a_stranger_that_says_nothing_is_left_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = VerifiedConnection("127.0.0.1", listener.getsockname()[1], plain(), timeout_s=0.2)
        with pytest.raises(TimeoutError):
            connection.connect()


ENDS: dict[str, Any] = {"client": ("10.0.0.1", 40_000), "server": ("10.0.0.2", 10_249)}


def answer_to(challenge: Challenge, **changes: str) -> bytes:
    """What our engine would answer, with `changes` to its headers."""
    nonce = challenge.request.partition(b"x-hpc-serve-challenge: ")[2].split()[0]
    proof = prove_connection(KEY.encode(), nonce, RECORD, host=host_id(), **ENDS).decode()
    headers = {"x-hpc-serve-proof": proof, "content-length": "0", **changes}
    return "\r\n".join(["HTTP/1.1 200 OK", *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def test_an_answer_may_come_byte_by_byte() -> None:
    challenge = make_challenge(plain(), **ENDS)
    for byte in answer_to(challenge, **{"content-length": "3"}) + b"abc":
        assert not challenge.is_answered
        challenge.read(bytes([byte]))
    assert challenge.is_answered


@pytest.mark.parametrize(
    "changes",
    [
        {"content-length": "-1"},
        {"content-length": "x"},
        {"content-length": "9" * 40},
        {"content-length": "¹"},
        {"connection": "close"},
        {"transfer-encoding": "chunked", "content-length": ""},
    ],
)
def test_a_proof_on_a_connection_that_cannot_go_on_is_refused(changes: dict[str, str]) -> None:
    challenge = make_challenge(plain(), **ENDS)
    with pytest.raises(NotOurEngineError):
        challenge.read(answer_to(challenge, **changes))


def test_bytes_after_the_answer_are_refused() -> None:
    challenge = make_challenge(plain(), **ENDS)
    with pytest.raises(NotOurEngineError, match="more than an answer"):
        challenge.read(answer_to(challenge) + b"HTTP/1.1 200 OK\r\n")


def test_every_challenge_is_another_one() -> None:
    assert make_challenge(plain(), **ENDS).request != make_challenge(plain(), **ENDS).request


def test_the_proof_is_of_the_ends_in_one_spelling() -> None:
    def proof(client: tuple[Any, ...], server: tuple[Any, ...]) -> bytes:
        return prove_connection(b"k", b"n", RECORD, host="h", client=client, server=server)

    assert proof(("10.0.0.1", 1), ("10.0.0.2", 2)) == proof(("::ffff:10.0.0.1", 1, 0, 0), ("::ffff:10.0.0.2", 2, 0, 0))
    assert proof(("fe80::1%eth0", 1), ("::1", 2)) == proof(("fe80:0::1", 1), ("0:0::1", 2))
    swapped = proof(("10.0.0.2", 2), ("10.0.0.1", 1))
    assert len({swapped, proof(("10.0.0.1", 1), ("10.0.0.2", 2)), proof(("10.0.0.1", 2), ("10.0.0.2", 2))}) == 3


def test_the_key_is_not_in_a_repr() -> None:
    assert KEY not in repr(plain())


# With TLS


@pytest.fixture
def ours(tmp_path: Path) -> RunCertificate:
    return make_run_certificate(tmp_path / "home", tmp_path, run="123-r0", addresses=[])


def pinned(ours: RunCertificate) -> Identity:
    return Identity(record=RECORD, certificate=ours.certificate, api_key=KEY)


def test_with_tls_the_certificate_is_what_counts(ours: RunCertificate) -> None:
    server = RecordingServer(server_context(ours.certificate_file, ours.key_file))
    try:
        assert ask(server.port, pinned(ours)) == b"ok"
    finally:
        server.close()


def test_with_tls_a_stranger_gets_nothing(ours: RunCertificate, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    theirs = make_run_certificate(folder / "home", folder, run="123-r0", addresses=[])
    server = RecordingServer(server_context(theirs.certificate_file, theirs.key_file))
    try:
        with pytest.raises(NotOurEngineError, match="does not show the certificate of the record"):
            ask(server.port, pinned(ours))
    finally:
        server.close()
    assert server.received == b""


def test_with_tls_a_relay_carries_what_it_cannot_read(ours: RunCertificate) -> None:
    server = RecordingServer(server_context(ours.certificate_file, ours.key_file))
    relay = Relay(server.port)
    try:
        assert ask(relay.port, pinned(ours)) == b"ok"
    finally:
        relay.close()
        server.close()
    assert KEY.encode() in server.received
    assert KEY.encode() not in relay.heard


def test_with_tls_an_answer_in_the_clear_is_refused(ours: RunCertificate) -> None:
    server = RecordingServer()
    try:
        with pytest.raises(NotOurEngineError, match="does not speak TLS"):
            ask(server.port, pinned(ours))
    finally:
        server.close()
    assert KEY.encode() not in server.received


def test_a_connection_that_was_lost_is_verified_anew(ours: RunCertificate, tmp_path: Path) -> None:
    """http.client connects again by itself when the server has closed the connection."""
    server = RecordingServer(server_context(ours.certificate_file, ours.key_file))
    connection = VerifiedConnection("127.0.0.1", server.port, pinned(ours), timeout_s=60)
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"ok"
    connection.close()
    server.close()
    stranger = RecordingServer()
    connection.port = stranger.port
    try:
        with pytest.raises(NotOurEngineError):
            connection.request("GET", "/", headers={"Authorization": f"Bearer {KEY}"})
    finally:
        stranger.close()
    assert KEY.encode() not in stranger.received
    assert issubclass(NotOurEngineError, OSError)
    assert not issubclass(NotOurEngineError, http.client.HTTPException)
