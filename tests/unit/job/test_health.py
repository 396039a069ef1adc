"""Ready is what a real request showed, against the stub engine and against servers that lie."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import threading
import wave
from email import message_from_bytes
from typing import Any

import pytest

from hpc_serve.job.engine.health import EngineAddress, NotReadyError, SmallRequest, check_ready, is_healthy
from hpc_serve.trust.certificates import make_run_certificate
from hpc_serve.trust.connection import Identity, NotOurEngineError
from tests.support.tls_servers import server_context


class Server(http.server.ThreadingHTTPServer):
    """What it answers, and what it was asked."""

    certificate: str
    seen: list[tuple[str, str | None]]
    answers: dict[str, Any]


class Liar(http.server.BaseHTTPRequestHandler):
    """Answers as its server's `answers` say: path -> (status, JSON)."""

    server: Server

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.answers.get(self.path, (404, {}))
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *words):
        pass


@contextlib.contextmanager
def answering(context):
    """A server that speaks TLS by `context`, or (None) in the clear."""
    server = Server(("127.0.0.1", 0), Liar)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.seen = []
    server.answers = {
        "/health": (200, {}),
        "/v1/models": (200, {"data": [{"id": "m"}]}),
        "/v1/completions": (200, {"choices": []}),
    }
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(certificate):
    with answering(server_context(certificate.certificate_file, certificate.key_file)) as server:
        server.certificate = certificate.certificate
        yield server


def engine(server) -> EngineAddress:
    identity = Identity(certificate=server.certificate, api_key="k3y")
    return EngineAddress(host="127.0.0.1", port=server.server_port, identity=identity)


def test_ready_needs_all_three(server):
    check_ready(engine(server), "m", completion_timeout_s=60)
    assert [path for path, _ in server.seen] == ["/health", "/v1/models", "/v1/completions"]
    assert [key for _, key in server.seen] == ["Bearer k3y"] * 3


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/health", (503, {}), "/health answers 503"),
        ("/v1/models", (200, {"data": [{"id": "another"}]}), "lists"),
        ("/v1/completions", (500, {}), "a first request was answered with 500"),
    ],
)
def test_any_of_them_alone_may_lie(server, path, answer, why):
    server.answers[path] = answer
    with pytest.raises(NotReadyError, match=why):
        check_ready(engine(server), "m", completion_timeout_s=60)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/classify", "/pooling", "/v1/audio/transcriptions"])
def test_a_model_without_text_is_asked_what_it_is_for(server, path):
    server.answers["/v1/completions"] = (400, {})
    server.answers[path] = (200, {})
    assert check_ready(engine(server), "m", completion_timeout_s=60).path == path
    server.answers[path] = (500, {})
    with pytest.raises(NotReadyError, match="a first request was answered with 500"):
        check_ready(engine(server), "m", completion_timeout_s=60)


def test_a_speech_model_is_asked_with_a_second_of_silence():
    asked = SmallRequest(path="/v1/audio/transcriptions", body={"model": "m", "language": "en"}).after_all_others()
    kind, content = asked.encoded()
    parts: Any = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + content).get_payload()
    named = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}
    assert (named["model"], named["language"]) == (b"m", b"en")
    with wave.open(io.BytesIO(named["file"])) as sound:
        assert sound.getnframes() / sound.getframerate() == 1
        assert set(sound.readframes(sound.getnframes())) == {0}


def test_nobody_there_is_not_healthy(server):
    address = engine(server)
    assert is_healthy(address)
    server.shutdown()
    server.server_close()
    assert not is_healthy(address)
    with pytest.raises(NotReadyError):
        check_ready(address, "m", completion_timeout_s=1)


@pytest.mark.parametrize("kind", ["in the clear", "own certificate"])
def test_whoever_took_the_port_first_is_sent_no_key(certificate, tmp_path, kind):
    """As a stranger who listens before the engine does: it answers everything as a ready engine would."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    shown = make_run_certificate(folder / "home", folder, run="1-r0", addresses=[])
    context = server_context(shown.certificate_file, shown.key_file) if kind == "own certificate" else None
    with answering(context) as stranger:
        stranger.certificate = certificate.certificate
        with pytest.raises(NotOurEngineError):
            is_healthy(engine(stranger))
        with pytest.raises(NotOurEngineError):
            check_ready(engine(stranger), "m", completion_timeout_s=60)
        assert {key for _, key in stranger.seen} <= {None}
        assert {path for path, _ in stranger.seen} <= {"/health"}
