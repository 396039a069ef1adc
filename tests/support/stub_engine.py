"""A stand-in for `vllm serve` where the engine is not what is tested. It serves no model, and says so in its answers.

    python tests/support/stub_engine.py serve MODEL [--port P] [--served-model-name A B] [--stub-… see --help]

Standard library only. It speaks enough of the OpenAI API for clients and launchers: /health, /v1/models,
/v1/completions and /v1/chat/completions, streams and tool calls included. It prints lines as vLLM 0.32 does while it
loads, guards its routes as the gate does when HPC_SERVE_API_KEY_FILE is set, and obeys HPC_SERVE_DRAIN_FILE and
HPC_SERVE_RECORD. Any other flag is ignored; STUB_ENGINE_ARGS in the environment adds flags.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import shlex
import signal
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

SHARDS = 5


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--headless", action="store_true", help="load and wait without a server, as vLLM's other nodes")
    parser.add_argument("--stub-load-s", type=float, default=0.0, help="seconds of loading, spread over the shards")
    parser.add_argument("--stub-hang-loading", action="store_true", help="never get past the first shard")
    parser.add_argument("--stub-fail", metavar="TEXT", help="print TEXT as an error while loading and exit with 1")
    parser.add_argument("--stub-exit-after-s", type=float, help="exit so many seconds after the server is up")
    parser.add_argument("--stub-exit-code", type=int, default=1, help="the exit code of those deaths")
    parser.add_argument("--stub-die-at-request", type=int, help="die in the middle of the Nth completion")
    parser.add_argument("--stub-error", type=int, help="answer every completion with this HTTP status")
    parser.add_argument("--stub-words", type=int, default=4, help="length of an answer")
    parser.add_argument("--stub-first-s", type=float, default=0.0, help="seconds before the first word")
    parser.add_argument("--stub-word-s", type=float, default=0.0, help="seconds between words")
    parser.add_argument("--stub-unhealthy-file", help="/health answers 503 while this file exists")
    parser.add_argument("--stub-ignore-sigterm", action="store_true")
    parser.add_argument("--stub-share-memory", action="store_true", help="leave a segment behind when killed, as vLLM")
    options, _ = parser.parse_known_args([*words, *shlex.split(os.environ.get("STUB_ENGINE_ARGS", ""))])
    return options


def say(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [stub_engine.py] {text}", flush=True)


def load(options: argparse.Namespace) -> None:
    """Look as if weights were loaded; returns when the server may start."""
    say("this is a stub engine: it serves no model")
    say(f"Starting to load model {options.model}...")
    for done in range(SHARDS + 1):
        shards = f"Loading safetensors checkpoint shards: {100 * done // SHARDS:3d}% Completed | {done}/{SHARDS}"
        print(f"{shards} [00:00<00:00,  1.00it/s]", file=sys.stderr, flush=True)
        if done == 1 and options.stub_fail:
            print(f"Traceback (most recent call last):\n{options.stub_fail}", file=sys.stderr, flush=True)
            sys.exit(1)
        if done == 1 and options.stub_hang_loading:
            threading.Event().wait()
        if done < SHARDS:
            time.sleep(options.stub_load_s / SHARDS)
    say("Model loading took 0.0 GiB memory and 0.000000 seconds")
    say("GPU KV cache size: 1,024 tokens")
    say("Maximum concurrency for 1,024 tokens per request: 1.00x")


class Engine(ThreadingHTTPServer):
    """The server and what its requests share."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names: list[str] = options.served_model_name or [options.model]
        self.completions = 0
        key_file = os.environ.get("HPC_SERVE_API_KEY_FILE")
        self.key = Path(key_file).read_bytes().strip() if key_file else None
        self.record = os.environ.get("HPC_SERVE_RECORD")
        self.tls: ssl.SSLContext | None = None
        if options.ssl_certfile:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        super().__init__((options.host, options.port), Handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.tls is not None:  # the handshake is the connection's own thread's: it begins with the first read
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def draining(self) -> bool:
        path = os.environ.get("HPC_SERVE_DRAIN_FILE")
        return path is not None and os.path.exists(path)


class Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            unhealthy = self.server.options.stub_unhealthy_file
            status = 503 if unhealthy and os.path.exists(unhealthy) else 200
            headers = {"X-HPC-Serve": "draining"} if self.server.draining else {}
            if self.server.key and self.server.record and (challenge := self.headers.get("X-HPC-Serve-Challenge")):
                headers["X-HPC-Serve-Proof"] = self.proof(self.server.key, self.server.record, challenge)
            self.answer(status, b"", headers)
        elif self.enters():
            models = [{"id": name, "object": "model", "owned_by": "stub"} for name in self.server.names]
            found = self.path == "/v1/models"
            self.answer_json(200, {"object": "list", "data": models}) if found else self.error(404, "Not Found")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.enters():
            return
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.error(404, "Not Found")
            return
        request = json.loads(body)
        options = self.server.options
        self.server.completions += 1
        if options.stub_error:
            self.error(options.stub_error, "a stubbed error")
        elif request.get("model") not in self.server.names:
            self.error(404, f"The model `{request.get('model')}` does not exist.")
        else:
            self.complete(request, dies=self.server.completions == options.stub_die_at_request)

    def proof(self, key: bytes, record: str, challenge: str) -> str:
        """The proof of an engine without TLS: of its key, its record and the ends of this connection."""
        (client, client_port), (host, port) = self.connection.getpeername()[:2], self.connection.getsockname()[:2]
        told = f"hpc-serve-connection\n{challenge}\n{record}\n{client} {client_port}\n{host} {port}"
        return hmac.new(key, told.encode(), "sha256").hexdigest()

    def enters(self) -> bool:
        """Whether the request may go on, asked as the gate asks."""
        given = self.headers.get("Authorization", "").encode().removeprefix(b"Bearer ")
        if self.server.key is not None and not hmac.compare_digest(given, self.server.key):
            self.error(401, "this stub engine asks for the API key", code="invalid_api_key")
            return False
        if self.server.draining:
            self.error(503, "draining", code="draining", headers={"X-HPC-Serve": "draining", "Retry-After": "2"})
            return False
        return True

    def complete(self, request: dict[str, Any], *, dies: bool) -> None:
        options = self.server.options
        is_chat = self.path.endswith("chat/completions")
        count = min(options.stub_words, request.get("max_tokens") or options.stub_words)
        port = self.server.server_address[1]
        words = [f"stub-{port}", *["word"] * (count - 1)]
        if options.stub_first_s:
            time.sleep(options.stub_first_s)
        if dies and not request.get("stream"):
            os._exit(options.stub_exit_code)
        reply: dict[str, Any] = {
            "id": f"stub-{self.server.completions}",
            "created": int(time.time()),
            "model": request["model"],
            "system_fingerprint": "stub engine, no model",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
        if request.get("stream"):
            self.stream(reply, words, usage, is_chat=is_chat, dies=dies)
            return
        time.sleep(options.stub_word_s * len(words))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if not is_chat:
            choice["text"] = " ".join(words)
        elif request.get("tools"):
            function = {"name": request["tools"][0]["function"]["name"], "arguments": "{}"}
            call = {"id": "call-1", "type": "function", "function": function}
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        else:
            choice["message"] = {"role": "assistant", "content": " ".join(words)}
        kind = "chat.completion" if is_chat else "text_completion"
        self.answer_json(200, {**reply, "object": kind, "choices": [choice], "usage": usage})

    def stream(
        self, reply: dict[str, Any], words: list[str], usage: dict[str, int], *, is_chat: bool, dies: bool
    ) -> None:
        reply["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for place, word in enumerate(words):
            text = word if place == 0 else f" {word}"
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if place == len(words) - 1 else None}
            choice |= {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            self.event(json.dumps({**reply, "choices": [choice]}))
            if dies and place == len(words) // 2:
                os._exit(self.server.options.stub_exit_code)
            time.sleep(self.server.options.stub_word_s)
        self.event(json.dumps({**reply, "choices": [], "usage": usage}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def error(self, status: int, text: str, *, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        error = {"message": text, "type": "stub", "param": None, "code": code or status}
        self.answer(status, json.dumps({"error": error}).encode(), headers or {})

    def answer_json(self, status: int, value: dict[str, Any]) -> None:
        self.answer(status, json.dumps(value).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Stub-Engine", str(self.server.server_address[1]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.stub_ignore_sigterm else lambda *_: sys.exit(0))
    if options.stub_share_memory:
        segment = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")  # which would tidy up, were it not killed too
    load(options)
    if options.headless:
        threading.Event().wait()
    engine = Engine(options)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
        scheme = "https" if engine.tls else "http"
        say(f"Starting vLLM server on {scheme}://{options.host}:{engine.server_address[1]}")
        say("Application startup complete.")
        threading.Event().wait(options.stub_exit_after_s)
        os._exit(options.stub_exit_code)


if __name__ == "__main__":
    main()
