"""Ready is what a real request showed, against the stub engine and against servers that lie."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import pytest

from hpc_serve.job.health import EngineAddress, NotReadyError, check_ready, is_healthy


class Server(http.server.ThreadingHTTPServer):
    """What it answers, and what it was asked."""

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


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Liar)
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


def engine(server) -> EngineAddress:
    return EngineAddress(host="127.0.0.1", port=server.server_port, api_key="k3y")


def test_ready_needs_all_three(server):
    check_ready(engine(server), "m", completion_timeout_s=5)
    assert [path for path, _ in server.seen] == ["/health", "/v1/models", "/v1/completions"]
    assert {key for _, key in server.seen} == {"Bearer k3y"}


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
        check_ready(engine(server), "m", completion_timeout_s=5)


def test_a_model_that_embeds_is_asked_to_embed(server):
    server.answers["/v1/completions"] = (400, {})
    server.answers["/v1/embeddings"] = (200, {})
    check_ready(engine(server), "m", completion_timeout_s=5)


def test_nobody_there_is_not_healthy(server):
    address = engine(server)
    assert is_healthy(address)
    server.shutdown()
    server.server_close()
    assert not is_healthy(address)
    with pytest.raises(NotReadyError):
        check_ready(address, "m", completion_timeout_s=1)


def test_the_key_is_not_in_the_repr(server):
    assert "k3y" not in repr(engine(server))
