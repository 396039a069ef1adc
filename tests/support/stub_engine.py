"""A stand-in for `vllm serve` where the engine is not what is tested. It serves no model, and says so in its answers.

    python tests/support/stub_engine.py serve MODEL [--port P | --config FILE] [--stub-… see --help]

Standard library only. It speaks enough of the OpenAI API for clients and launchers: /health, /v1/models,
/v1/completions and /v1/chat/completions, streams and tool calls included, and /v1/embeddings. With --enable-lora it
takes adapters, and an answer of one begins with its folder. It refuses what vLLM 0.32 refuses (`stub_refusals`). It
prints lines as vLLM does while it loads, guards its routes as the gate does when HPC_SERVE_API_KEY_FILE is set, and
obeys HPC_SERVE_DRAIN_FILE and HPC_SERVE_RECORD. Any other flag is ignored; STUB_ENGINE_ARGS in the environment adds
flags. To requests that ask with the header X-HPC-Serve-Signs it sends signs as the gate does, until a request waits for
the end of --stub-hang-file.

With --stub-greedy an answer at temperature 0 follows from the prompt alone, as a model's does: each token follows from
all the text before it (`next_token`). A request that holds the beginning of an answer (a completion's prompt, or
`continue_final_message` in a chat) gets the rest of it. A token of the answer has an id, as has each character of other
text; a prompt may be given as ids, and `return_token_ids` returns them. --stub-work-log writes down what was worked on.
"""

from __future__ import annotations

import argparse
import array
import base64
import contextlib
import hashlib
import hmac
import json
import mmap
import os
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

try:
    from tests.support.stub_refusals import (
        LOAD_ADAPTER,
        PAUSES,
        UNLOAD_ADAPTER,
        WEIGHT_INFO,
        WEIGHT_VERSION,
        Refusal,
        change_adapters,
        check_length,
        check_request,
        check_route,
        read_body,
        read_weight_version,
    )
except ImportError:  # run as a program, alone or in the launcher's process
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from stub_refusals import (  # type: ignore[import-not-found, no-redef]
        LOAD_ADAPTER,
        PAUSES,
        UNLOAD_ADAPTER,
        WEIGHT_INFO,
        WEIGHT_VERSION,
        Refusal,
        change_adapters,
        check_length,
        check_request,
        check_route,
        read_body,
        read_weight_version,
    )

WORKER = "VLLM::Worker"
SHARDS = 5
STEP_S = 0.05
SIGN_S = 0.5
PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"
COMMENT = b"3\r\n:\n\n\r\n"
_LAST_TOKEN = re.compile(r"w(\d+)\.[0-9a-f]{4}$")
_TOKEN = re.compile(r"( ?)w(\d+)\.([0-9a-f]{4})")
END_ID, FIRST_ID, HALF_ID = 1, 0x110000, 1 << 40
CONTEXT_LENGTH = 100_000


def embed(request: dict[str, Any]) -> list[dict[str, Any]]:
    """A vector for each text of a request for embeddings: the same for the same text, another for another."""
    texts = [request["input"]] if isinstance(request["input"], str) else request["input"]
    vectors = [[byte - 127.5 for byte in hashlib.sha256(str(text).encode()).digest()] for text in texts]
    if request.get("encoding_format") == "base64":
        packed = (array.array("f", vector).tobytes() for vector in vectors)
        return [
            {"object": "embedding", "index": n, "embedding": base64.b64encode(p).decode()} for n, p in enumerate(packed)
        ]
    return [{"object": "embedding", "index": number, "embedding": vector} for number, vector in enumerate(vectors)]


def next_token(context: str, length: int, *, salt: str = "") -> str | None:
    """The token that follows a text; None where an answer of `length` tokens ends. `salt` stands for sampling."""
    last = _LAST_TOKEN.search(context)
    place = int(last[1]) + 1 if last else 0
    if place >= length:
        return None
    digest = hashlib.sha256((salt + context).encode()).hexdigest()[:4]
    return f"{' ' if place else ''}w{place}.{digest}"


def greedy_answer(context: str, length: int) -> str:
    """The whole answer to a context at temperature 0.

    >>> greedy_answer("why?", 3) == greedy_answer("why?", 2) + greedy_answer("why?" + greedy_answer("why?", 2), 3)
    True
    """
    text = ""
    while (token := next_token(context + text, length)) is not None:
        text += token
    return text


def encode(text: str) -> list[int]:
    """The ids of a text's tokens.

    >>> decode(encode("why? w0.12ab w1.ffff w1.zzzz")) == "why? w0.12ab w1.ffff w1.zzzz"
    True
    """
    ids: list[int] = []
    end = 0
    for match in _TOKEN.finditer(text):
        space, place, digest = match[1], int(match[2]), int(match[3], 16)
        if bool(space) == bool(place):  # a token as `next_token` makes them
            ids += map(ord, text[end : match.start()])
            ids.append(FIRST_ID + place * 0x10000 + digest)
            end = match.end()
    return [*ids, *map(ord, text[end:])]


def decode(ids: list[int]) -> str:
    """The text of tokens. The first half of one has none."""
    return "".join(map(_piece, ids))


def _piece(token: int) -> str:
    if token < FIRST_ID:
        return "" if token == END_ID else chr(token)
    place, digest = divmod(token - FIRST_ID, 0x10000)
    return "" if token >= HALF_ID else f"{' ' if place else ''}w{place}.{digest:04x}"


def chat_context(messages: list[dict[str, Any]], *, is_continued: bool = False) -> str:
    """The text that a chat template makes of messages; with `is_continued` the last one is left open."""
    texts = [f"<{message['role']}>{_content(message)}" for message in messages]
    return "\n".join(texts) if is_continued else "\n".join([*texts, "<assistant>"])


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int)
    parser.add_argument("--config", metavar="FILE", help="a YAML file, of which the line `port: P` is read")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-model-len", type=int, default=CONTEXT_LENGTH)
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--headless", action="store_true", help="load and wait without a server, as vLLM's other nodes")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--stub-load-s", type=float, default=0.0, help="seconds of loading, spread over the shards")
    parser.add_argument("--stub-map-weights", action="store_true", help="map and read the model's files, one by one")
    parser.add_argument("--stub-hang-loading", action="store_true", help="never get past the first shard")
    parser.add_argument(
        "--stub-hold-file",
        type=os.path.expandvars,
        help="while this file exists, loading does not get past the first shard; $VARIABLES of the job are put in",
    )
    parser.add_argument("--stub-fail", metavar="TEXT", help="print TEXT as an error while loading and exit with 1")
    parser.add_argument(
        "--stub-fail-warm", metavar="TEXT", help="once loaded, the same with what an earlier start compiled"
    )
    parser.add_argument("--stub-exit-after-s", type=float, help="exit so many seconds after the server is up")
    parser.add_argument("--stub-exit-code", type=int, default=1, help="the exit code of those deaths")
    parser.add_argument("--stub-die-at-request", type=int, help="die in the middle of the Nth completion")
    parser.add_argument("--stub-error", type=int, help="answer every completion with this HTTP status")
    parser.add_argument("--stub-words", type=int, default=4, help="length of an answer")
    parser.add_argument("--stub-first-s", type=float, default=0.0, help="seconds before the first word")
    parser.add_argument("--stub-word-s", type=float, default=0.0, help="seconds between words")
    parser.add_argument("--stub-greedy", action="store_true", help="an answer at temperature 0 follows from its prompt")
    parser.add_argument("--stub-halves", action="store_true", help="a word is two tokens, and the first has no text")
    parser.add_argument(
        "--stub-stream-end",
        choices=["whole", "open", "broken"],
        default="whole",
        help="after [DONE]: end the body; leave it open; close the connection without its end",
    )
    parser.add_argument("--stub-slots", type=int, default=256, help="requests worked on at once; the others wait")
    parser.add_argument("--stub-hang-file", help="while this file exists no word comes, and /health answers 200")
    parser.add_argument("--stub-step-file", help="while this file exists a step is under way: no word comes, signs do")
    parser.add_argument("--stub-hang-after", type=int, default=0, help="so many words of a stream come all the same")
    parser.add_argument("--stub-work-log", metavar="FOLDER", help="write a line for each request begun and ended")
    parser.add_argument("--shutdown-timeout", type=float, default=0.0, help="vLLM's: seconds for requests under way")
    parser.add_argument("--stub-unhealthy-file", help="/health answers 503 while this file exists")
    parser.add_argument("--stub-ignore-sigterm", action="store_true")
    parser.add_argument(
        "--stub-worker", action="store_true", help="have a worker process, and end as vLLM when it ends"
    )
    parser.add_argument("--stub-dying-s", type=float, default=1.0, help="seconds from its worker's end to its own")
    parser.add_argument("--stub-dying-file", help="while this file exists, it does not end with its worker")
    parser.add_argument("--stub-share-memory", action="store_true", help="leave a segment behind when killed, as vLLM")
    options, _ = parser.parse_known_args([*words, *shlex.split(os.environ.get("STUB_ENGINE_ARGS", ""))])
    if options.port is None and not options.headless:
        options.port = port_in(Path(options.config)) if options.config else 8000
    return options


def port_in(config: Path) -> int:
    match = re.search(r"^port: (\d+)$", config.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{config} names no port")
    return int(match[1])


def say(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [stub_engine.py] {text}", flush=True)


def load(options: argparse.Namespace) -> None:
    """Look as if weights were loaded; returns when the server may start."""
    say("this is a stub engine: it serves no model")
    say(f"Starting to load model {options.model}...")
    caches = os.environ.get("VLLM_CACHE_ROOT")
    compiled = Path(caches) / "graph" if caches else None
    is_warm = compiled is not None and compiled.exists()
    if is_warm:
        say(f"Directly load AOT compilation from path {compiled}")
    files = sorted(Path(options.model).glob("*.safetensors")) if options.stub_map_weights else []
    total = len(files) or SHARDS
    for done in range(total + 1):
        shards = f"Loading safetensors checkpoint shards: {100 * done // total:3d}% Completed | {done}/{total}"
        print(f"{shards} [00:00<00:00,  1.00it/s]", file=sys.stderr, flush=True)
        if done == 1 and options.stub_fail:
            print(f"Traceback (most recent call last):\n{options.stub_fail}", file=sys.stderr, flush=True)
            sys.exit(1)
        if done == 1 and options.stub_hang_loading:
            wait_for_a_signal()
        while done == 1 and options.stub_hold_file and os.path.exists(options.stub_hold_file):
            time.sleep(STEP_S)
        if done < total:
            time.sleep(options.stub_load_s / total)
            if files:
                map_whole(files[done])
    if compiled is not None:
        with contextlib.suppress(OSError):
            compiled.parent.mkdir(parents=True, exist_ok=True)
            compiled.write_text("compiled")
    say("Model loading took 0.0 GiB memory and 0.000000 seconds")
    if is_warm and options.stub_fail_warm:
        print(f"Traceback (most recent call last):\n{options.stub_fail_warm}", file=sys.stderr, flush=True)
        sys.exit(options.stub_exit_code)
    say("GPU KV cache size: 1,024 tokens")
    say("Maximum concurrency for 1,024 tokens per request: 1.00x")


def map_whole(path: Path) -> None:
    """Read a file as vLLM's default loader does: page by page, as it is looked at."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped[:: mmap.PAGESIZE]


def wait_for_a_signal(most_s: float | None = None) -> None:
    """Wait; the handler of a signal raises. One wait without end would not see a signal that comes just before it."""
    ends_at_s = time.monotonic() + most_s if most_s is not None else float("inf")
    while (left_s := ends_at_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.2))


class Work:
    """The requests that wait and run, counted as vLLM's metrics count them, and written to the work log."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._slots = threading.Semaphore(options.stub_slots)
        self._lock = threading.Lock()
        self._folder = options.stub_work_log
        self.waiting = 0
        self.running = 0
        self.count = self.under_way = 0
        self.tokens = 0
        self.ended: Counter[str] = Counter()

    @contextlib.contextmanager
    def request(self, context: str) -> Iterator[Progress]:
        """One request, from its arrival to its end; `finish` of the value says how it ended."""
        progress = Progress(self)
        arrived_at = time.monotonic()
        with self._lock:
            self.waiting += 1
        with self._slots:
            waited_s = round(time.monotonic() - arrived_at, 3)
            with self._lock:
                self.waiting -= 1
                self.running += 1
            self._write(event="begun", request=progress.name, context=context, waited_s=waited_s)
            try:
                yield progress
            finally:
                with self._lock:
                    self.running -= 1
                    self.ended[progress.finish] += 1
                self._write(event=progress.finish, request=progress.name, tokens=progress.tokens)

    @contextlib.contextmanager
    def counted(self, *, is_canary: bool) -> Iterator[None]:
        """Count a request as the gate counts it."""
        with self._lock:
            self.count += not is_canary
            self.under_way += not is_canary
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= not is_canary

    def requests(self) -> str:
        return f"{os.getpid()} {self.count} {self.under_way}"

    def add_token(self) -> None:
        with self._lock:
            self.tokens += 1

    def metrics(self, model: str) -> str:
        """What vLLM's /metrics says of the same."""
        labels = f'engine="0",model_name="{model}"'
        lines = []
        for name, kind, value in (
            ("num_requests_running", "gauge", self.running),
            ("num_requests_waiting", "gauge", self.waiting),
            ("generation_tokens_total", "counter", self.tokens),
        ):
            lines += [f"# TYPE vllm:{name.removesuffix('_total')} {kind}", f"vllm:{name}{{{labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success counter")
        for reason in ("stop", "length", "abort", "error"):
            value = self.ended[reason]
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(value)}')
        return "\n".join(lines) + "\n"

    def _write(self, **values: Any) -> None:
        if not self._folder:
            return
        line = json.dumps({"at": time.monotonic(), **values}) + "\n"
        path = Path(self._folder) / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        with contextlib.suppress(OSError), path.open("a") as log:
            log.write(line)


class EngineDeadError(Exception):
    """vLLM's, in its words."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class Progress:
    """How far one request is."""

    def __init__(self, work: Work) -> None:
        self.name = secrets.token_hex(4)
        self.tokens = 0
        self.finish = "abort"
        self._work = work

    def add_token(self) -> None:
        self.tokens += 1
        self._work.add_token()


class Wire:
    """A connection to write to: its request's answer, and between its parts signs that the engine lives."""

    def __init__(self, raw: Any, connection: Any) -> None:
        self._raw, self._connection = raw, connection
        self._lock = threading.Lock()
        self._wrote_at_s = 0.0
        self.sign = b""
        """The sign that may be sent now."""

    def write(self, data: bytes) -> int:
        with self._lock:
            self._wrote_at_s = time.monotonic()
            written: int = self._raw.write(data)
            return written

    def ask(self) -> None:
        """Let signs come, the first SIGN_S from now on."""
        self._wrote_at_s, self.sign = time.monotonic(), PROCESSING

    def send_sign(self) -> None:
        """Send a sign if nothing was sent lately, unless the client does not read."""
        with self._lock:
            now_s = time.monotonic()
            room = select.poll()
            if self.sign and now_s - self._wrote_at_s >= SIGN_S - STEP_S:
                room.register(self._connection, select.POLLOUT)
                if room.poll(0):
                    self._wrote_at_s = now_s
                    self._raw.write(self.sign)

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        self._raw.close()

    @property
    def closed(self) -> bool:
        return bool(self._raw.closed)


class Engine(ThreadingHTTPServer):
    """The server and what its requests share."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names: list[str] = options.served_model_name or [options.model]
        self.adapters: dict[str, str] = {}
        """The folders of those loaded, by name."""
        self.takes_adapters = options.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"
        self.is_paused = False
        self.weight_version = "default"
        self.completions = 0
        self.work = Work(options)
        self.is_leaving = False
        self.is_dead = False
        self.asked_for_signs: set[Wire] = set()
        self.hung: set[object] = set()
        key_file = os.environ.get("HPC_SERVE_API_KEY_FILE")
        self.key = Path(key_file).read_bytes().strip() if key_file else None
        self.tls: ssl.SSLContext | None = None
        if options.ssl_certfile:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        super().__init__((options.host, options.port), Handler, bind_and_activate=False)
        self.server_bind()

    def serve_on_launchers_socket(self) -> None:
        """As the gate has vLLM do, if there is a launcher; else listen on the own port."""
        if path := os.environ.get("HPC_SERVE_ENGINE_SOCKET"):
            with socket.socket(socket.AF_UNIX) as launcher:
                launcher.connect(path)
                _, (descriptor,), _, _ = socket.recv_fds(launcher, 1, 1)
            self.socket.close()
            self.socket = socket.socket(fileno=descriptor)
            self.server_address = self.socket.getsockname()
        self.server_activate()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.tls is not None:  # the handshake is the connection's own thread's: it begins with the first read
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def watch_worker(self) -> None:
        """Start a worker, and end once it has: as vLLM, whose requests get an error, in the stream if one has begun."""
        # It ends when the pipe closes: it must not outlive an engine that is killed.
        worker = subprocess.Popen([WORKER], executable=shutil.which("cat"), stdin=subprocess.PIPE)
        worker.wait()
        self.is_dead = True
        time.sleep(self.options.stub_dying_s)
        while self.options.stub_dying_file and os.path.exists(self.options.stub_dying_file):
            time.sleep(STEP_S)
        os._exit(self.options.stub_exit_code)

    def send_signs(self) -> None:
        """Send signs for ever, as the gate does: while no request waits for an engine that hangs."""
        while True:
            time.sleep(STEP_S)
            for wire in () if self.is_hung else tuple(self.asked_for_signs):
                with contextlib.suppress(OSError, ValueError):
                    wire.send_sign()

    @property
    def is_hung(self) -> bool:
        """Whether a request waits for the end of a hang."""
        options = self.options
        hangs_at_once = options.stub_hang_file and not options.stub_hang_after and self.work.running
        return bool(self.hung) or bool(hangs_at_once and os.path.exists(options.stub_hang_file))

    @property
    def state(self) -> str:
        """What the gate says of the engine to its launcher."""
        if self.is_hung:
            return "its engine has made no step, and the stub hangs"
        if self.is_paused:
            return "paused"
        return "busy" if self.work.running + self.work.waiting else "idle"

    def finish(self) -> None:
        """As vLLM at SIGTERM: new requests get 500, those under way go on for --shutdown-timeout seconds.

        A further SIGTERM changes nothing.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.is_leaving = True
        deadline = time.monotonic() + self.options.shutdown_timeout
        while self.work.running + self.work.waiting and time.monotonic() < deadline:
            time.sleep(STEP_S)

    @property
    def draining(self) -> bool:
        path = os.environ.get("HPC_SERVE_DRAIN_FILE")
        return path is not None and os.path.exists(path)


class Handler(BaseHTTPRequestHandler):
    server: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.wire = Wire(self.wfile, self.connection)
        self.wfile = self.wire  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        finally:
            self.wire.sign = b""
            self.server.asked_for_signs.discard(self.wire)
            self.server.hung.discard(self)

    def end_headers(self) -> None:
        self.wire.sign = b""
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            unhealthy = self.server.options.stub_unhealthy_file
            status = 503 if unhealthy and os.path.exists(unhealthy) else 200
            headers = {"X-HPC-Serve": "draining"} if self.server.draining else {}
            if self.has_key():
                headers["X-HPC-Serve-Engine"] = self.server.state
            self.answer(status, b"", headers)
        elif not self.enters() or not self.has_route():
            return
        elif self.path == "/metrics":
            text = self.server.work.metrics(self.server.names[0])
            headers = {"X-HPC-Serve-Requests": self.server.work.requests()}
            self.answer(200, text.encode(), headers, kind="text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/version":
            self.answer_json(200, {"version": "stub"})
        elif self.path == WEIGHT_INFO:
            self.answer_json(200, {"weight_version": self.server.weight_version})
        else:
            model = {"object": "model", "owned_by": "stub", "max_model_len": self.server.options.max_model_len}
            models = [{"id": name, **model} for name in self.server.names]
            adapters = self.server.adapters.items()
            models += [
                {"id": name, "root": folder, "parent": self.server.names[0], **model} for name, folder in adapters
            ]
            self.answer_json(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.enters() or not self.has_route():
            return
        with self.server.work.counted(is_canary=self.headers.get("X-HPC-Serve") == "canary"):
            try:
                self.post(body)
            except Refusal as refusal:
                self.answer_json(refusal.status, refusal.content)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.enters():
            self.has_route()

    do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = do_PUT

    def has_route(self) -> bool:
        """Whether there is such a route; refuses the request where there is none."""
        try:
            check_route(self.command, self.path.partition("?")[0], has_adapters=self.server.takes_adapters)
        except Refusal as refusal:
            self.answer_json(refusal.status, refusal.content)
            return False
        return True

    def post(self, body: bytes) -> None:
        options = self.server.options
        path = self.path = self.path.partition("?")[0]
        if path in PAUSES:
            self.server.is_paused = path == PAUSES[0]
            self.answer_json(200, {"status": "paused" if self.server.is_paused else "resumed"})
            return
        content_type = self.headers.get("Content-Type", "")
        if path == WEIGHT_VERSION:
            self.server.weight_version = read_weight_version(content_type, body)
            self.answer_json(200, {"success": True, "new_version": self.server.weight_version})
            return
        request = read_body(content_type, body)
        names = self.server.names
        if path in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            said = change_adapters(self.server.adapters, path, request, names=names, rank=options.max_lora_rank)
            self.answer(200, said.encode(), {}, kind="text/plain")
            return
        names = [*names, *self.server.adapters]
        check_request(path, request, names=names, most_tokens=options.max_model_len)
        if path == "/detokenize":
            tokens = request["tokens"]
            self.answer_json(200, {"prompt": decode(tokens) + ("\ufffd" if tokens and tokens[-1] >= HALF_ID else "")})
            return
        if path == "/tokenize":
            text = chat_context(request["messages"]) if "messages" in request else request["prompt"]
            count = len(encode(text))
            self.answer_json(200, {"tokens": encode(text), "count": count, "max_model_len": options.max_model_len})
            return
        if path == "/v1/embeddings":
            self.answer_json(200, {"object": "list", "model": names[0], "data": embed(request)})
            return
        check_length(len(encode(self.context(request))), options.max_model_len)
        self.server.completions += 1
        if self.server.is_leaving:
            self.error(500, "the stub engine is shutting down")
        elif self.server.is_dead:
            self.error(500, str(EngineDeadError()))
        elif options.stub_error:
            self.error(options.stub_error, "a stubbed error")
        else:
            self.complete(request, dies=self.server.completions == options.stub_die_at_request)

    def enters(self) -> bool:
        """Whether the request may go on, asked as the gate asks."""
        if not self.has_key():
            self.error(401, "this stub engine asks for the API key", code="invalid_api_key")
            return False
        if self.server.draining and self.path != "/metrics":
            self.error(503, "draining", code="draining", headers={"X-HPC-Serve": "draining", "Retry-After": "2"})
            return False
        if self.path in (LOAD_ADAPTER, UNLOAD_ADAPTER) and self.headers.get("X-HPC-Serve") != "canary":
            self.error(403, "the launcher's alone", code="one_replica_alone")
            return False
        if self.headers.get("X-HPC-Serve-Signs") == "1":
            self.wire.ask()
            self.server.asked_for_signs.add(self.wire)
        return True

    def has_key(self) -> bool:
        given = self.headers.get("Authorization", "").encode().removeprefix(b"Bearer ")
        return self.server.key is None or hmac.compare_digest(given, self.server.key)

    def complete(self, request: dict[str, Any], *, dies: bool) -> None:
        options = self.server.options
        is_chat = self.path.endswith("chat/completions")
        with self.server.work.request(self.context(request)) as progress:
            self.due_s = time.monotonic()
            self.pause(options.stub_first_s)
            if dies and not request.get("stream"):
                os._exit(options.stub_exit_code)
            reply: dict[str, Any] = {
                "id": f"stub-{self.server.completions}",
                "created": int(time.time()),
                "model": request["model"],
                "system_fingerprint": "stub engine, no model",
            }
            if request.get("stream"):
                self.stream(reply, request, progress, is_chat=is_chat, dies=dies)
                return
            words, finish = [], ""
            try:
                for _, word, reason in self.shown(request):
                    words.append(word)
                    finish = reason
                    progress.add_token()
                    self.pause(options.stub_word_s)
            except EngineDeadError as error:
                self.error(500, str(error))
                return
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            if not is_chat:
                choice["text"] = "".join(words)
            elif request.get("tools"):
                function = {"name": request["tools"][0]["function"]["name"], "arguments": "{}"}
                call = {"id": "call-1", "type": "function", "function": function}
                choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
                choice["finish_reason"] = "tool_calls"
            else:
                choice["message"] = {"role": "assistant", "content": "".join(words)}
            kind = "chat.completion" if is_chat else "text_completion"
            reply |= {"object": kind, "choices": [choice], "usage": self.usage(request, len(words))}
            self.answer_json(200, reply)
            progress.finish = finish

    def context(self, request: dict[str, Any]) -> str:
        """All the text that an answer follows from."""
        if not self.path.endswith("chat/completions"):
            prompt = request.get("prompt", "")
            return decode(prompt) if isinstance(prompt, list) else str(prompt)
        return chat_context(request.get("messages", []), is_continued=bool(request.get("continue_final_message")))

    def words(self, request: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
        """The tokens of the answer: the id, the text, and the reason to stop after it, "" until the last."""
        options = self.server.options
        most = request.get("max_completion_tokens") or request.get("max_tokens") or sys.maxsize
        if not options.stub_greedy:
            most = most if request.get("ignore_eos") else min(most, options.stub_words)
            adapter = self.server.adapters.get(request.get("model", ""))
            first = f"stub-{self.server.server_address[1]}" if adapter is None else f"adapter-{adapter}"
            for place in range(most):
                word = " word" if place else first
                yield 0, word, "stop" if place == most - 1 else ""
            return
        is_greedy = request.get("temperature") == 0
        salt = "" if is_greedy else str(request.get("seed") or secrets.token_hex(4))
        context, prompt = self.context(request), request.get("prompt")
        is_half = isinstance(prompt, list) and bool(prompt) and prompt[-1] >= HALF_ID
        if is_half:  # vLLM's detokenizer loses its place there
            yield END_ID, context, ""
        word = next_token(context, options.stub_words, salt=salt)
        if word is None:  # the text holds a whole answer: the one token that ends it
            yield END_ID, "", "stop"
        while word is not None and most > 0:
            (token,) = encode(word)
            if options.stub_halves and not is_half:
                most -= 1
                yield token + HALF_ID, "", "" if most else "length"
            if not most:
                return
            is_half = False
            context += word
            most -= 1
            following = next_token(context, options.stub_words, salt=salt)
            yield token, word, "stop" if following is None else "length" if not most else ""
            word = following

    def shown(self, request: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
        """The same with the text that is shown by then: the last characters wait, as a stop string may begin there."""
        stop = request.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        held = max((len(stop) - 1 for stop in stops), default=0)
        text, shown = "", 0
        for token, word, finish in self.words(request):
            text += word
            if ends := [text.index(stop) for stop in stops if stop in text]:
                yield token, text[shown : min(ends)], "stop"
                return
            until = len(text) if finish else max(shown, len(text) - held)
            yield token, text[shown:until], finish
            shown = until

    def pause(self, seconds: float, *, words: int = 0) -> None:
        """The time that a word takes. `words` of the stream have come.

        It is counted from when the word before was due: the work of sending does not make the pace slower, unless it
        takes longer than a word. Raises ConnectionResetError once the client has left (vLLM aborts its request),
        EngineDeadError with the worker.
        """
        options = self.server.options
        is_held = words >= options.stub_hang_after
        hang_file, step_file = (options.stub_hang_file, options.stub_step_file) if is_held else (None, None)
        client = select.poll()
        client.register(self.connection, select.POLLIN)
        now_s = time.monotonic()
        self.due_s = max(self.due_s + seconds, now_s)
        time.sleep(self.due_s - now_s)
        while True:
            if client.poll(0):  # no client sends more before it has its answer
                raise ConnectionResetError
            if self.server.is_dead:
                raise EngineDeadError
            hangs = bool(hang_file) and os.path.exists(hang_file)
            (self.server.hung.add if hangs else self.server.hung.discard)(self)
            if not hangs and not self.server.is_paused and not (step_file and os.path.exists(step_file)):
                return
            time.sleep(STEP_S)
            self.due_s = time.monotonic()

    def stream(
        self, reply: dict[str, Any], request: dict[str, Any], progress: Progress, *, is_chat: bool, dies: bool
    ) -> None:
        options = self.server.options
        reply["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wire.sign = COMMENT if self.wire in self.server.asked_for_signs else b""
        self.pause(0)
        if is_chat and options.stub_greedy:  # as vLLM's first chunk
            first = {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}
            self.event(json.dumps({**reply, "choices": [first], **self.prompt_ids(request)}))
        finish = "stop"
        try:
            finish = self.stream_words(reply, request, progress, is_chat=is_chat, dies=dies)
        except EngineDeadError as failure:
            error = {"message": str(failure), "type": "InternalServerError", "param": None, "code": 500}
            self.event(json.dumps({"error": error}))
            finish = "error"
        else:
            if not options.stub_greedy or (request.get("stream_options") or {}).get("include_usage"):
                self.event(json.dumps({**reply, "choices": [], "usage": self.usage(request, progress.tokens)}))
        self.event("[DONE]")
        self.wire.sign = b""
        if options.stub_stream_end == "whole":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = options.stub_stream_end == "broken"
        progress.finish = finish

    def stream_words(
        self, reply: dict[str, Any], request: dict[str, Any], progress: Progress, *, is_chat: bool, dies: bool
    ) -> str:
        """Send a chunk for each word; returns the reason to stop."""
        options, finish = self.server.options, "stop"
        prompt_ids = self.prompt_ids(request)
        for place, (token, text, finish) in enumerate(self.shown(request)):
            progress.add_token()
            ids = {"token_ids": [token]} if prompt_ids else {}
            if not place and not is_chat:
                ids |= prompt_ids
            for index in range(request.get("n") or 1):
                choice = self.choice(request, place, text, finish, is_chat=is_chat)
                self.event(json.dumps({**reply, "choices": [{"index": index, **choice, **ids}]}))
            if dies and place == min(options.stub_words, request.get("max_tokens") or options.stub_words) // 2:
                os._exit(options.stub_exit_code)
            self.pause(options.stub_word_s, words=place + 1)
        return finish

    def choice(self, request: dict[str, Any], place: int, text: str, finish: str, *, is_chat: bool) -> dict[str, Any]:
        """What a chunk says of one more token: text, or a part of a tool call's arguments; and its logprobs."""
        if not is_chat:
            choice: dict[str, Any] = {"text": text}
        elif request.get("tools") and self.server.options.stub_greedy:
            begin, end = "" if place else '{"words": "', '"}' if finish else ""
            call: dict[str, Any] = {"index": 0, "function": {"arguments": begin + text + end}}
            if not place:
                call |= {"id": "call-1", "type": "function"}
                call["function"]["name"] = request["tools"][0]["function"]["name"]
            finish = finish and "tool_calls"
            choice = {"delta": {"tool_calls": [call]}}
        else:
            role = {} if self.server.options.stub_greedy else {"role": "assistant"}
            choice = {"delta": {**role, "content": text}}
        if request.get("logprobs"):
            of_chat = {"content": [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
            choice["logprobs"] = of_chat if is_chat else {"tokens": [text], "token_logprobs": [-0.5]}
        return {**choice, "finish_reason": finish or None}

    def prompt_ids(self, request: dict[str, Any]) -> dict[str, Any]:
        """The ids of the prompt's tokens, where they are asked for."""
        asked = self.server.options.stub_greedy and request.get("return_token_ids")
        return {"prompt_token_ids": encode(self.context(request))} if asked else {}

    def usage(self, request: dict[str, Any], tokens: int) -> dict[str, int]:
        prompt = len(encode(self.context(request)))
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def event(self, data: str) -> None:
        content = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

    def error(self, status: int, text: str, *, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        error = {"message": text, "type": "stub", "param": None, "code": code or status}
        self.answer(status, json.dumps({"error": error}).encode(), headers or {})

    def answer_json(self, status: int, value: dict[str, Any]) -> None:
        self.answer(status, json.dumps(value).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str], *, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Stub-Engine", str(self.server.server_address[1]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)


def main() -> None:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.stub_ignore_sigterm else lambda *_: sys.exit(0))
    if options.stub_share_memory:
        segment = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")  # which would tidy up, were it not killed too
    engine = None if options.headless else Engine(options)
    load(options)
    if engine is None:
        wait_for_a_signal()
        return
    engine.serve_on_launchers_socket()
    if options.stub_worker:
        threading.Thread(target=engine.watch_worker, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
            threading.Thread(target=engine.send_signs, daemon=True).start()
            scheme = "https" if engine.tls else "http"
            say(f"Starting vLLM server on {scheme}://{options.host}:{engine.server_address[1]}")
            say("Application startup complete.")
            wait_for_a_signal(options.stub_exit_after_s)
        except SystemExit:
            engine.finish()
            raise
        os._exit(options.stub_exit_code)


if __name__ == "__main__":
    main()
